from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.contracts import EnvObs
from embodied_rl.envs.base import ADAPTERS, SimEnv, adapter_class
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.errors import UserError
from embodied_rl.params import parse_params
from tests.fakes import seen_after

REPOSITORY = Path(__file__).parents[2]


def success_rate(act: Callable[[EnvObs], torch.Tensor], max_episode_steps: int) -> float:
    sim: SimEnv = DummyEnv(256, DummyParams(), seed=0)
    env = ChunkedEnv(
        sim,
        env_ids=range(256),
        num_action_chunks=4,
        max_episode_steps=max_episode_steps,
        auto_reset=False,
        ignore_terminations=False,
        use_rel_reward=True,
        reward_coef=1.0,
    )
    obs = env.reset(range(256))
    while not env.all_done:
        obs = seen_after(env.chunk_step(act(obs)))
    return float(np.mean([record.success for record in env.drain_episodes()]))


def test_the_direct_way_always_succeeds_and_chance_almost_never() -> None:
    def straight(obs: EnvObs) -> torch.Tensor:
        needed = (obs.state[:, 2:] - obs.state[:, :2]) / DummyParams().step_size / 4
        return needed.clamp(-1, 1)[:, None].repeat(1, 4, 1)

    generator = torch.Generator().manual_seed(0)
    assert success_rate(straight, 24) == 1.0
    assert success_rate(lambda obs: torch.randn(256, 4, 2, generator=generator), 32) < 0.05
    assert success_rate(lambda obs: torch.rand(256, 4, 2, generator=generator) * 2 - 1, 32) < 0.05
    assert success_rate(lambda obs: torch.zeros(256, 4, 2), 32) == 0.0


def test_one_step_by_hand() -> None:
    sim = DummyEnv(1, DummyParams(step_size=0.5, success_radius=0.1, success_bonus=2.0), seed=0)
    sim.reset([0], [0])
    x, y, goal_x, goal_y = sim.observe([0]).state[0]
    outcome = sim.step([0], np.array([[-0.5, 3.0]], dtype=np.float32))
    moved = np.clip([x - 0.25, y + 0.5], -1, 1)  # an action beyond 1 counts as 1
    np.testing.assert_allclose(sim.observe([0]).state[0], [*moved, goal_x, goal_y], rtol=1e-6)
    before, after = np.hypot(x - goal_x, y - goal_y), np.hypot(moved[0] - goal_x, moved[1] - goal_y)
    assert outcome.rewards[0] == pytest.approx(before - after, abs=1e-6)
    assert not outcome.success[0]
    for _ in range(8):
        place = sim.observe([0]).state[0]
        outcome = sim.step([0], np.clip((place[2:] - place[:2]) / 0.5, -1, 1)[None])
    assert outcome.success[0]
    assert outcome.rewards[0] == pytest.approx(before + 2.0, abs=1e-5)


def test_initial_states_are_functions_of_their_id() -> None:
    sim = DummyEnv(4, DummyParams(states_per_task=3), seed=0)
    assert sim.num_reset_states == 12
    sim.reset([0, 1], [5, 7])
    other = DummyEnv(4, DummyParams(states_per_task=3), seed=9)
    other.reset([3, 2], [5, 7])
    np.testing.assert_array_equal(sim.observe([0, 1]).state, other.observe([3, 2]).state)
    assert len({tuple(row) for row in _initial_states(DummyParams())}) == 256


def _initial_states(params: DummyParams) -> np.ndarray:
    sim = DummyEnv(4 * params.states_per_task, params, seed=0)
    sim.reset(range(sim.num_reset_states), range(sim.num_reset_states))
    return sim.observe(range(sim.num_reset_states)).state


def test_the_goal_lies_in_the_quadrant_the_instruction_names() -> None:
    params = DummyParams()
    sim = DummyEnv(1, params, seed=0)
    for reset_state_id, (_, _, goal_x, goal_y) in enumerate(_initial_states(params)):
        name = f"{'upper' if goal_y > 0 else 'lower'} {'right' if goal_x > 0 else 'left'}"
        assert sim.task(reset_state_id).instruction == f"move the point to the goal in the {name} quadrant"
        assert sim.task(reset_state_id).task_id == reset_state_id // 64
    with pytest.raises(ValueError, match="got 256, expected 0 to 255"):
        sim.task(256)


def test_slots_are_independent() -> None:
    one, many = DummyEnv(1, DummyParams(), seed=0), DummyEnv(3, DummyParams(), seed=0)
    many.reset([0, 1, 2], [10, 20, 30])
    one.reset([0], [20])
    actions = np.random.default_rng(0).uniform(-1, 1, size=(5, 3, 2)).astype(np.float32)
    for step in actions:
        together, alone = many.step([0, 1, 2], step), one.step([0], step[1:2])
        assert together.rewards[1] == alone.rewards[0]
    np.testing.assert_array_equal(many.observe([1]).state, one.observe([0]).state)


def test_images_show_the_point_and_the_goal_upright() -> None:
    sim = DummyEnv(2, DummyParams(image_size=32), seed=0)
    sim.reset([0, 1], [0, 200])
    obs = sim.observe([0, 1])
    image = obs.images["agentview"]
    assert image.shape == (2, 32, 32, 3)
    assert image.dtype == np.uint8
    assert sim.image_shapes == {"agentview": (32, 32)}
    for picture, (x, y, goal_x, goal_y) in zip(image, obs.state, strict=True):
        for colour, place in (((200, 40, 40), (x, y)), ((40, 160, 60), (goal_x, goal_y))):
            rows, columns = np.nonzero((picture == colour).all(axis=-1))
            assert (columns.mean() + 0.5) / 16 - 1 == pytest.approx(place[0], abs=0.05)
            assert 1 - (rows.mean() + 0.5) / 16 == pytest.approx(place[1], abs=0.05)
    assert sim.render([1]).shape == (1, 128, 128, 3)


def test_no_camera_by_default() -> None:
    sim = DummyEnv(1, DummyParams(), seed=0)
    sim.reset([0], [0])
    assert sim.image_shapes == {}
    assert sim.observe([0]).images == {}


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(UserError, match=r"step_size: got 0 .* greater than 0"):
        parse_params(DummyParams, {"step_size": 0}, "env.init_params")
    with pytest.raises(UserError, match=r"image_size: got -1 .* greater than or equal to 0"):
        parse_params(DummyParams, {"image_size": -1}, "env.init_params")


def test_registry_finds_adapters_by_name_and_by_path() -> None:
    assert adapter_class("dummy") is DummyEnv
    assert adapter_class("embodied_rl.envs.dummy:DummyEnv") is DummyEnv
    with pytest.raises(UserError, match=r"env\.env_type: got 'dumy'.* Did you mean 'dummy'\?"):
        adapter_class("dumy")
    with pytest.raises(UserError, match=r"no class 'DumyEnv'\. Did you mean 'DummyEnv'\?"):
        adapter_class("embodied_rl.envs.dummy:DumyEnv")
    with pytest.raises(UserError, match="module 'no_such_module' cannot be imported"):
        adapter_class("no_such_module:Env")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("env_type", ADAPTERS)
def test_adapters_import_without_torch_and_without_their_simulator(env_type: str) -> None:
    heavy = ["torch", "libero", "robosuite", "mujoco", "mani_skill", "sapien"]
    result = _python(
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"  # None in sys.modules: importing it fails
        "from embodied_rl.envs.base import adapter_class\n"
        f"assert adapter_class({env_type!r}).Params"
    )
    assert result.returncode == 0, result.stderr


def test_import_under_the_folders_name_is_refused() -> None:
    result = _python("import envs.base")
    assert result.returncode != 0
    assert "Write: import embodied_rl.envs" in result.stderr
