"""EnvPool behind the simulator protocol. Its package has an environment of its own: scripts/optional_env.sh."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

envpool = pytest.importorskip("envpool")

from embodied_rl.cli import main  # noqa: E402
from embodied_rl.envs.envpool import EnvPoolEnv, EnvPoolParams  # noqa: E402
from embodied_rl.errors import UserError  # noqa: E402


def made(env_id: str, slots: int, **params: object) -> EnvPoolEnv:
    return EnvPoolEnv(slots, EnvPoolParams(id=env_id, **params), seed=0)  # pyright: ignore[reportArgumentType]


def test_an_initial_state_is_a_seed_in_any_slot_and_any_company() -> None:
    together, alone = made("HalfCheetah-v5", 3), made("HalfCheetah-v5", 3)
    together.reset([0, 1, 2], [5, 6, 5])
    alone.reset([2], [6])
    alone.reset([1], [5])
    state = together.observe([0, 1, 2]).state
    assert (state[0] == state[2]).all() and (state[0] != state[1]).any()
    assert (alone.observe([2, 1]).state == state[[1, 0]]).all()


def test_slots_of_several_resets_are_stepped_each_with_its_own_action() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (12, 4, 6)).astype(np.float32)
    mixed = made("HalfCheetah-v5", 4)
    mixed.reset([3, 0], [30, 0])
    mixed.reset([1, 2], [10, 20])
    mixed.reset([3], [33])
    order = [2, 0, 3, 1]
    alone = {slot: made("HalfCheetah-v5", 1) for slot in order}
    for slot, env in alone.items():
        env.reset([0], [{0: 0, 1: 10, 2: 20, 3: 33}[slot]])
    for step in actions:
        got = mixed.step(order, step[order])
        for position, slot in enumerate(order):
            want = alone[slot].step([0], step[[slot]])
            assert got.rewards[position] == want.rewards[0]
            assert (mixed.observe([slot]).state == alone[slot].observe([0]).state).all()
    with pytest.raises(ValueError, match="NaN"):
        mixed.step([0], np.full((1, 6), np.nan, np.float32))


def test_a_pole_falls_and_a_horizon_truncates() -> None:
    env = made("CartPole-v1", 2)
    assert (env.action_dim, env.action_choices, env.state_dim, env.image_shapes) == (1, (2,), 4, {})
    env.reset([0, 1], [0, 1])
    lengths = [0, 0]
    ended = np.zeros(2, np.bool_)
    while not ended.all():
        open_slots = [slot for slot in (0, 1) if not ended[slot]]
        step = env.step(open_slots, np.ones((len(open_slots), 1), np.float32))
        assert step.terminated is not None and step.truncated is not None
        assert (step.rewards == 1).all() and not step.truncated.any()
        for position, slot in enumerate(open_slots):
            ended[slot], lengths[slot] = step.terminated[position], lengths[slot] + 1
    assert all(8 <= length <= 11 for length in lengths)  # always to one side
    with pytest.raises(ValueError, match="expected whole numbers below"):
        env.step([0], np.full((1, 1), 2, np.float32))
    short = made("CartPole-v1", 1, kwargs={"max_episode_steps": 3})
    short.reset([0], [0])
    cuts = [short.step([0], np.ones((1, 1), np.float32)).truncated for _ in range(3)]
    assert [cut is not None and bool(cut[0]) for cut in cuts] == [False, False, True]


def test_actions_fill_the_bounds_of_their_space() -> None:
    """Pendulum's torque is ±2: the reward's 0.001 u² tells."""
    env = made("Pendulum-v1", 3)
    env.reset([0, 1, 2], [4, 4, 4])
    rewards = env.step([0, 1, 2], np.array([[0], [1], [7]], np.float32)).rewards
    np.testing.assert_allclose(rewards[0] - rewards[1:], 0.001 * 2**2, rtol=1e-3)


def test_pictures_choices_and_parts_of_dicts() -> None:
    atari = made("Pong-v5", 1)
    raw = envpool.make_gymnasium("Pong-v5", num_envs=1, seed=3).reset()[0][0]
    assert (atari.image_shapes, atari.state_dim, atari.action_choices) == ({"agentview": (84, 84)}, 0, (6,))
    atari.reset([0], [0])
    picture = atari.observe([0]).images["agentview"]
    assert (picture.shape, picture.dtype, raw.shape) == ((1, 84, 84, 3), np.uint8, (4, 84, 84))
    assert atari.render([0]).shape == (1, 210, 160, 3)
    lake = made("FrozenLake-v1", 1)
    lake.reset([0], [0])
    assert lake.observe([0]).state.tolist() == [[1.0] + [0.0] * 15]
    reach = made("FetchReach-v4", 1, state=("desired_goal", "observation"))
    reach.reset([0], [0])
    assert reach.state_dim == 13
    held = reach.step([0], np.zeros((1, 4), np.float32))
    assert held.success.tolist() == [False]
    with pytest.raises(UserError, match=r"cannot draw FetchReach-v4.*save_video=false"):
        reach.render([0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"id": "CartPol-v1"}, r"EnvPool knows no such env.*'CartPole-v1'"),
        ({"id": "CartPole-v1", "kwargs": {"foo": 1}}, r"kwargs: CartPole-v1 cannot be made with"),
        ({"id": "FetchReach-v4", "state": ("goal",)}, r"observes no numbers 'goal', only .*'desired_goal'"),
    ],
)
def test_what_does_not_exist(params: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvPoolEnv(1, EnvPoolParams(**params), seed=0)  # pyright: ignore[reportArgumentType]


def test_a_success_key_that_info_lacks() -> None:
    env = made("CartPole-v1", 1, success_key="solved")
    env.reset([0], [0])
    with pytest.raises(UserError, match=r"has no 'solved' in the info"):
        env.step([0], np.zeros((1, 1), np.float32))


@pytest.mark.parametrize("cluster", ["serial", "process"])
def test_a_run_trains_and_evaluates(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "env=envpool", f"cluster={cluster}", f"runner.output_dir={tmp_path}", "runner.max_steps=2", "algorithm=ppo",
        "env.train.max_steps_per_rollout_epoch=32", "env.train.auto_reset=true", "env.eval.episodes_per_task=16",
        "env.eval.max_episode_steps=30",
    ]  # fmt: skip
    main(options)
    assert "finished: step 2/2" in capsys.readouterr().out
    (evaluation,) = tmp_path.glob("*/*/eval_step_000002/eval.json")
    result = json.loads(evaluation.read_text())
    assert (result["overall"]["n_episodes"], result["per_task"][0]["instruction"]) == (16, "cart pole")
    assert result["meta"]["versions"]["envpool"] == envpool.__version__
