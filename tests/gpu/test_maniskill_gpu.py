"""ManiSkill with all slots in one batch on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.envs.maniskill import ManiSkillEnv, ManiSkillParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
pytest.importorskip("mani_skill", reason="the maniskill extra is not installed")

SLOTS = 4


@pytest.fixture(scope="module")
def env() -> Iterator[ManiSkillEnv]:
    env = ManiSkillEnv(SLOTS, ManiSkillParams(env_id="PushCube-v1", sim_backend="physx_cuda"), seed=7)
    yield env
    env.close()


def states(env: ManiSkillEnv, slots: list[int], reset_state_ids: list[int]) -> NDArray[np.float32]:
    env.reset(slots, reset_state_ids)
    return env.observe(slots).state


def test_starts_depend_on_the_reset_state_alone(env: ManiSkillEnv) -> None:
    assert env.batched
    together = states(env, [0, 1, 2, 3], [5, 6, 5, 7])
    np.testing.assert_allclose(together[0], together[2], atol=1e-5)
    assert abs(together[0] - together[1]).max() > 1e-3
    np.testing.assert_allclose(states(env, [3], [6])[0], together[1], atol=1e-5)


def test_a_partial_reset_leaves_the_others_alone(env: ManiSkillEnv) -> None:
    states(env, list(range(SLOTS)), [0, 1, 2, 3])
    for _ in range(3):
        env.step(list(range(SLOTS)), np.full((SLOTS, env.action_dim), 0.5, np.float32))
    inside = env._envs[0]  # `observe` gives what the last step or reset of a slot left
    before = inside.get_obs().cpu().numpy()
    env.reset([1], [9])
    after = inside.get_obs().cpu().numpy()
    np.testing.assert_array_equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert abs(after[1] - before[1]).max() > 1e-3


def test_equal_starts_and_actions_go_the_same_way(env: ManiSkillEnv) -> None:
    states(env, list(range(SLOTS)), [3] * SLOTS)
    for _ in range(10):
        outcome = env.step(list(range(SLOTS)), np.full((SLOTS, env.action_dim), 0.3, np.float32))
    after = env.observe(list(range(SLOTS))).state
    np.testing.assert_allclose(after, after[:1].repeat(SLOTS, 0), atol=1e-3)
    np.testing.assert_allclose(outcome.rewards, outcome.rewards[0], atol=1e-3)


def test_images_of_a_batch() -> None:
    params = ManiSkillParams(env_id="PushCube-v1", sim_backend="physx_cuda", obs_mode="rgb")
    env = ManiSkillEnv(SLOTS, params, seed=7)
    env.reset([0, 1], [0, 1])
    images = env.observe([1, 0]).images["base_camera"]
    assert images.shape == (2, 128, 128, 3)
    assert images.std() > 10
    env.close()
