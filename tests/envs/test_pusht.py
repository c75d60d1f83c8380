from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from embodied_rl import launch
from embodied_rl.cli import config_of
from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams
from embodied_rl.errors import UserError

pusht = pytest.importorskip("gym_pusht.envs.pusht", reason="the extra for pusht is not installed")

PUSHT: dict[str, Any] = {"id": "gym_pusht:gym_pusht/PushT-v0", "wrappers": ("embodied_rl.envs.pusht:FromAgent",)}
CORNERS = {"obs_type": "environment_state_agent_pos"}


def board_of(sim: GymnasiumEnv, slot: int) -> Any:
    return sim._envs[slot].unwrapped


def test_an_action_is_where_to_go_from_here() -> None:
    sim = GymnasiumEnv(2, GymnasiumParams(**PUSHT, kwargs=CORNERS), seed=0)
    assert (sim.action_dim, sim.state_dim) == (2, 36)
    sim.reset([0, 1], [7, 7])
    for slot in (0, 1):
        board_of(sim, slot).agent.position = (60.0, 400.0)  # off the T
    for _ in range(5):
        sim.step([0, 1], np.array([[0, 0], [0.5, 0]], np.float32))
    (x, y), (moved, still) = (board_of(sim, slot).agent.position for slot in (0, 1))
    assert (x, y) == pytest.approx((60, 400), abs=1e-6)
    assert moved > 60 + 50 and still == pytest.approx(400, abs=1)
    assert sim.observe([0]).state[0, :2] == pytest.approx([60 / 256 - 1, 400 / 256 - 1], abs=1e-4)


def test_at_the_goal_no_corner_is_away_from_its_place() -> None:
    sim = GymnasiumEnv(1, GymnasiumParams(**PUSHT, kwargs=CORNERS), seed=0)
    sim.reset([0], [3])
    board = board_of(sim, 0)
    away = sim.observe([0]).state[0, 20:].reshape(8, 2)
    assert np.abs(away).max() > 0.05
    board.agent.position = (60.0, 60.0)
    board.block.angle, board.block.position = board.goal_pose[2], tuple(board.goal_pose[:2])
    step = sim.step([0], np.zeros((1, 2), np.float32))
    assert step.success.tolist() == [True]
    state = sim.observe([0]).state[0]
    assert state[20:] == pytest.approx(np.zeros(16), abs=0.01)
    from_agent = state[4:20].reshape(8, 2) * 256 + np.array(board.agent.position)
    assert from_agent == pytest.approx(board.get_keypoints(board._block_shapes), abs=0.01)


def test_what_guides_adds_up_to_what_is_nearer_at_the_end() -> None:
    guide = {"embodied_rl.envs.pusht:FromAgent": {"progress": 100.0, "approach": 50.0}}
    plain = GymnasiumEnv(1, GymnasiumParams(**PUSHT, kwargs=CORNERS), seed=0)
    guided = GymnasiumEnv(1, GymnasiumParams(id=PUSHT["id"], wrappers=(guide,), kwargs=CORNERS), seed=0)
    for sim in (plain, guided):
        sim.reset([0], [7])

    def distances() -> tuple[float, float]:
        """Mean of the corners' to their places, and the agent's to their middle, in halves of the board."""
        state = plain.observe([0]).state[0]
        corners = state[4:20].reshape(8, 2)
        return float(np.linalg.norm(state[20:].reshape(8, 2), axis=1).mean()), float(np.linalg.norm(corners.mean(0)))

    (corners, agent), paid = distances(), 0.0
    for _ in range(30):  # straight to the T, and on
        towards = plain.observe([0]).state[:, 4:20].reshape(8, 2).mean(0)
        action = (towards / np.linalg.norm(towards))[None].astype(np.float32)
        paid += float(guided.step([0], action).rewards[0] - plain.step([0], action).rewards[0])
    after, agent_after = distances()
    assert agent_after < agent - 0.1 and abs(after - corners) > 0.05, "it met the T"
    assert paid == pytest.approx(100 * (corners - after) + 50 * (agent - agent_after), abs=1e-2)


def test_the_board_has_an_edge() -> None:
    sim = GymnasiumEnv(1, GymnasiumParams(**PUSHT, kwargs=CORNERS), seed=0)
    sim.reset([0], [7])
    board_of(sim, 0).agent.position = (500.0, 30.0)
    sim.step([0], np.ones((1, 2), np.float32))
    assert board_of(sim, 0)._last_action == pytest.approx([512, 130], abs=0.1)


def test_an_env_without_the_corners_is_refused() -> None:
    with pytest.raises(UserError, match=r"expected PushT with env\.init_params\.kwargs=\{obs_type"):
        GymnasiumEnv(1, GymnasiumParams(**PUSHT), seed=0)


def test_the_preset_trains_over_the_end_of_an_episode(tmp_path: Path) -> None:
    """300 steps, after which the env is reset by itself."""
    few = ["env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=310", "algorithm.update_epoch=1"]
    few += [f"eval_env.eval.{key}" for key in ("episodes_per_task=1", "total_num_envs=1", "max_episode_steps=4")]
    config = config_of("experiment=pusht_ppo", "runner.max_steps=1", f"runner.output_dir={tmp_path}", *few)
    run_dir = launch.run(config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    [step] = [line for line in lines if "time/step" in line]
    assert step["env/episodes"] >= 2 and step["env/return"] != 0
    [evaluated] = [line["eval/return"] for line in lines if "eval/return" in line]
    assert evaluated >= 0, "four steps of what the T covers, by themselves"


PUBLISHED, FAST = PUSHT["id"], "embodied_rl.envs.fast_pusht:FastPushT-v0"


@pytest.fixture
def in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published env takes the T's rectangles as a set gives them, on which the last digit of an area depends."""
    published = pusht.pymunk_to_shapely

    def ordered(body: Any, shapes: Any) -> Any:
        return published(body, sorted(shapes, key=lambda shape: max(y for _, y in shape.get_vertices())))

    monkeypatch.setattr(pusht, "pymunk_to_shapely", ordered)


def assert_same(one: Any, other: Any) -> None:
    """In every bit, and of the same type."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, tuple):
        for part, counterpart in zip(one, other, strict=True):
            assert_same(part, counterpart)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@pytest.mark.usefixtures("in_one_order")
@pytest.mark.parametrize("obs_type", ["state", "environment_state_agent_pos"])
def test_less_python_changes_nothing(obs_type: str) -> None:
    envs: list[Any] = [gymnasium.make(name, obs_type=obs_type) for name in (PUBLISHED, FAST)]
    boards: list[Any] = [env.unwrapped for env in envs]
    rng, covered, moved = np.random.default_rng(0), 0, 0
    for seed in range(8):
        # Most episodes begin with the T near its goal.
        near = [100, 100, *rng.uniform(230, 280, 2), rng.uniform(-3, 3)]
        options = {"reset_to_state": near} if seed % 4 else None
        assert_same(*(env.reset(seed=seed, options=options) for env in envs))
        for _ in range(150):
            place = boards[0].block.position
            # Mostly through the T.
            target = place + rng.normal(0, 60, 2) if rng.random() < 0.8 else rng.uniform(0, 512, 2)
            action = np.clip(target, 0, 512).astype(np.float32)
            steps = [env.step(action) for env in envs]
            assert_same(*steps)
            assert boards[0].n_contact_points == boards[1].n_contact_points
            covered, moved = covered + (steps[0][1] > 0), moved + (boards[0].block.position != place)
    assert covered > 60 and moved > 100


@pytest.mark.usefixtures("in_one_order")
def test_what_is_remembered_is_of_the_present_place() -> None:
    kind = "environment_state_agent_pos"
    envs: list[Any] = [gymnasium.make(name, obs_type=kind).unwrapped for name in (PUBLISHED, FAST)]
    published, fast = envs
    for env in envs:
        env.reset(seed=1)

    def moved(**places: Any) -> Any:
        for env in envs:
            for name, value in places.items():
                setattr(env.block if hasattr(env.block, name) else env, name, value)
        assert_same(published._get_coverage(), fast._get_coverage())
        assert_same(published.get_obs(), fast.get_obs())
        return fast._get_coverage()

    assert moved(angle=np.pi / 4, position=(256, 256)) > 0.99
    assert 0.2 < moved(position=(270, 256)) < 0.99
    assert 0 < moved(angle=1.0) < 0.99
    assert moved(goal_pose=np.array([100.0, 100.0, 0.0])) == 0
    fast.get_obs()["environment_state"][:] = 0
    assert moved() == 0, "the caller's array is the caller's"
