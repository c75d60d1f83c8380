from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams, _scenes

pytest.importorskip("libero", reason="the libero extra is not installed")

from embodied_rl.envs.libero.expert import LiberoExpert

NEXT_TO_PLATE = 8
STATE = 50 * NEXT_TO_PLATE


def env_with(reward: Literal["success", "progress", "subgoals"]) -> LiberoEnv:
    return LiberoEnv(1, LiberoParams(task_suite_name="libero_spatial", cameras=(), reward=reward), seed=0)


@pytest.fixture(scope="module", autouse=True)
def free_scenes() -> Iterator[None]:
    yield
    _scenes.clear()


def test_reward_grows_from_reaching_to_success() -> None:
    env = env_with("progress")
    expert = LiberoExpert(env)
    env.reset([0], [STATE])
    start = level_of(env)
    expert.reset(0)
    levels, success = [], False
    while not success and len(levels) < 120:
        step = env.step([0], expert.act(0, None)[None])
        levels.append(float(step.rewards[0]))
        success = bool(step.success[0])
    env.close()
    assert 0.05 < start < 0.4
    assert success and levels[-1] == pytest.approx(1.0 - start)
    assert abs(levels[0]) < 0.05
    assert levels[len(levels) // 2] > levels[0] + 0.05
    assert 0.6 < max(levels[:-1]) + start < 0.8
    grasps = np.flatnonzero(np.diff(levels) > 0.15)
    assert len(grasps) >= 1, "both fingers touching the bowl count at once"


def level_of(env: LiberoEnv) -> float:
    """The formula, from the robosuite simulation; of an object that nobody holds."""
    simulation = env.privileged(0).sim
    bowl, plate = (
        simulation.data.body_xpos[simulation.model.body_name2id(f"{name}_main")]
        for name in ("akita_black_bowl_1", "plate_1")
    )
    hand = simulation.data.site_xpos[env.privileged(0).robots[0].eef_site_id]
    reached, placed = 1 - np.tanh(10 * np.linalg.norm(hand - bowl)), 1 - np.tanh(5 * np.linalg.norm(bowl - plate))
    return float(0.2 * reached + 0.4 * placed)


def test_level_by_hand() -> None:
    env = env_with("progress")
    env.reset([0], [STATE])
    start = level_of(env)
    expert = LiberoExpert(env)
    expert.reset(0)
    rewards = [float(env.step([0], expert.act(0, None)[None]).rewards[0]) for _ in range(20)]  # on its way to the bowl
    end = level_of(env)
    env.close()
    # The level sees positions from 2 ms before the step's end.
    assert rewards[-1] == pytest.approx(end - start, abs=0.01)
    assert abs(rewards[-1]) > 0.02


def test_the_reward_changes_no_trajectory() -> None:
    ends = []
    rewards: tuple[Literal["success", "progress", "subgoals"], ...] = ("success", "progress", "subgoals")
    for reward in rewards:
        env = env_with(reward)
        env.reset([0], [STATE])
        actions = np.random.default_rng(0).uniform(-1, 1, (10, 1, 7)).astype(np.float32)
        steps = [env.step([0], action) for action in actions]
        if reward == "success":
            assert all(float(step.rewards[0]) == 0.0 for step in steps)
        ends.append(env.observe([0]).state)
        env.close()
    for end in ends[1:]:
        np.testing.assert_array_equal(ends[0], end)
