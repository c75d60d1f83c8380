"""Gymnasium envs behind the simulator protocol."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hydra.core.override_parser.overrides_parser import OverridesParser

from embodied_rl.envs.base import SimStep
from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams
from embodied_rl.errors import UserError
from embodied_rl.seeding import derived_seed

PICTURE = spaces.Box(0, 255, (6, 8, 3), np.uint8)


class Probe(gymnasium.Env):
    """Shows what it is given: the last action is in the observation, and info has whatever ``info`` says."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012 - Gymnasium's

    def __init__(
        self,
        action: Any = None,
        observation: Any = None,
        info: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.action_space = spaces.Box(-1, 1, (1,)) if action is None else action
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,)) if observation is None else observation
        self.info, self.render_mode, self.taken = info or {}, render_mode, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        return self.observation_space.sample(), 2.5, False, False, self.info

    def render(self) -> np.ndarray:
        return np.full((10, 12, 3), 7, np.uint8)


gymnasium.register("tests/Probe-v0", entry_point=f"{__name__}:Probe")


def probe(**options: Any) -> tuple[GymnasiumEnv, Probe]:
    kwargs = {name: options.pop(name) for name in ("action", "observation", "info") if name in options}
    env = GymnasiumEnv(1, GymnasiumParams(id="tests/Probe-v0", kwargs=kwargs, **options), seed=0)
    env.reset([0], [0])
    inner = env._envs[0].unwrapped
    assert isinstance(inner, Probe)
    return env, inner


def step(env: GymnasiumEnv, *action: float) -> SimStep:
    return env.step([0], np.array([action], np.float32))


def test_continuous_actions_fill_the_bounds_of_their_space() -> None:
    low, high = np.array([[-2.0, 0.0], [-np.inf, 10.0]]), np.array([[2.0, 1.0], [np.inf, 30.0]])
    env, inner = probe(action=spaces.Box(low, high, dtype=np.float64))
    assert (env.action_dim, env.action_choices) == (4, ())
    for action, expected in (
        ((-1, -1, -1, -1), [[-2, 0], [-1, 10]]),
        ((1, 1, 0.25, 1), [[2, 1], [0.25, 30]]),
        ((0, 0, 0, 0), [[0, 0.5], [0, 20]]),
        ((3, -9, 0, 3), [[2, 0], [0, 30]]),
        ((0, 0, -2.5, 0), [[0, 0.5], [-2.5, 20]]),
    ):
        step(env, *action)
        assert inner.taken[-1].tolist() == expected
        assert inner.taken[-1].dtype == np.float64


def test_a_single_bound_is_kept() -> None:
    low, high = np.array([0.0, -np.inf], np.float32), np.array([np.inf, 5.0], np.float32)
    env, inner = probe(action=spaces.Box(low, high))
    for action, expected in (((2.5, -7), [2.5, -7]), ((-0.5, 9), [0, 5])):
        step(env, *action)
        assert inner.taken[-1].tolist() == expected


def test_names_of_a_dict_space_may_have_slashes() -> None:
    inner = spaces.Dict({"top/left": PICTURE, "top": spaces.Dict({"right": spaces.Box(0, 1, (2,))})})
    env, _ = probe(observation=spaces.Dict({"a/b": spaces.Box(0, 1, (3,)), "seen": inner}))
    last: Any = env._last[0]
    assert env.image_shapes == {"seen/top/left": (6, 8)}
    obs = env.observe([0])
    assert np.array_equal(obs.images["seen/top/left"][0], last["seen"]["top/left"])
    assert np.array_equal(obs.state[0], np.concatenate([last["a/b"], last["seen"]["top"]["right"]]))


@pytest.mark.parametrize(
    ("space", "choices", "action", "expected"),
    [
        (spaces.Discrete(3), (3,), (2,), 2),
        (spaces.Discrete(3, start=-1), (3,), (0,), -1),
        (spaces.MultiDiscrete([2, 5]), (2, 5), (1, 4), [1, 4]),
        (spaces.MultiDiscrete(np.array([[2], [5]]), start=np.array([[0], [3]])), (2, 5), (1, 0), [[1], [3]]),
        (spaces.MultiBinary(3), (2, 2, 2), (1, 0, 1), [1, 0, 1]),
    ],
)
def test_choices(space: Any, choices: tuple[int, ...], action: tuple[int, ...], expected: Any) -> None:
    env, inner = probe(action=space)
    assert (env.action_dim, env.action_choices) == (len(choices), choices)
    step(env, *action)
    assert np.array_equal(inner.taken[-1], expected)
    for wrong in ([*choices], [-1] * len(choices), [0.5] * len(choices)):
        with pytest.raises(ValueError, match="expected whole numbers below"):
            step(env, *wrong)


def test_actions_and_observations_without_a_meaning_here_are_refused() -> None:
    with pytest.raises(UserError, match=r"actions Text.*wrapper"):
        probe(action=spaces.Text(3))
    with pytest.raises(UserError, match=r"no fixed number of values"):
        probe(observation=spaces.Sequence(spaces.Discrete(2)))


def test_plain_observations_become_a_state() -> None:
    for space, size in ((spaces.Box(-1, 1, (2, 3)), 6), (spaces.Discrete(4), 4), (spaces.MultiBinary(3), 3)):
        env, _ = probe(observation=space)
        state = env.observe([0]).state
        assert (env.state_dim, env.image_shapes, state.shape, state.dtype) == (size, {}, (1, size), np.float32)
    env, _ = probe(observation=spaces.Discrete(4))
    assert sorted(env.observe([0]).state[0].tolist()) == [0, 0, 0, 1]


@pytest.mark.parametrize("shape", [(6, 8, 3), (6, 8, 1), (6, 8)])
def test_an_image_observation_is_a_camera(shape: tuple[int, ...]) -> None:
    env, _ = probe(observation=spaces.Box(0, 255, shape, np.uint8))
    obs = env.observe([0])
    assert (env.state_dim, env.image_shapes) == (0, {"agentview": (6, 8)})
    assert obs.state.shape == (1, 0)
    assert obs.images["agentview"].shape == (1, 6, 8, 3)
    assert np.array_equal(obs.images["agentview"][0, ..., 0], np.reshape(env._last[0], (6, 8, -1))[..., 0])


@pytest.mark.parametrize(("shape", "newest"), [((4, 6, 8), [1, 2, 3]), ((3, 6, 8), [0, 1, 2]), ((1, 6, 8), [0, 0, 0])])
def test_channels_in_front_are_a_camera_too(shape: tuple[int, ...], newest: list[int]) -> None:
    """Of stacked grey frames the newest three, as with Gymnasium's AtariPreprocessing and FrameStackObservation."""
    env, _ = probe(observation=spaces.Box(0, 255, shape, np.uint8))
    assert (env.state_dim, env.image_shapes) == (0, {"agentview": (6, 8)})
    seen = env.observe([0]).images["agentview"]
    assert seen.shape == (1, 6, 8, 3)
    assert np.array_equal(seen[0], np.moveaxis(env._last[0][newest], 0, -1))


def test_frames_that_gymnasium_stacks_are_a_camera() -> None:
    grey = spaces.Box(0, 255, (6, 8), np.uint8)
    env, _ = probe(observation=grey, wrappers=({"FrameStackObservation": {"stack_size": 4}},))
    env.step([0], np.zeros((1, env.action_dim), np.float32))
    assert (env.state_dim, env.image_shapes) == (0, {"agentview": (6, 8)})
    assert np.array_equal(env.observe([0]).images["agentview"][0], np.moveaxis(np.asarray(env._last[0])[1:], 0, -1))


def test_pictures_of_a_shape_that_is_not_known_do_not_become_a_state_unasked() -> None:
    stacked = spaces.Box(0, 255, (4, 6, 8, 3), np.uint8)  # FrameStackObservation of coloured frames
    both = spaces.Dict({"frames": stacked, "goal": spaces.Box(0, 1, (1,))})
    for observation, key, named in (
        (stacked, "", r"which is no picture \(uint8 \[H,W,3\]"),
        (
            both,
            "frames",
            "as 'frames', which is no picture",
        ),
    ):
        with pytest.raises(UserError, match=named) as caught:
            probe(observation=observation)
        (argument,) = (word for word in shlex.split(str(caught.value)) if word.startswith("env.init_params.state="))
        assert OverridesParser.create().parse_override(argument).value() == [key], "as the shell hands it over"
    with pytest.raises(UserError, match=r"would observe nothing of .*leave these keys out"):
        probe(observation=stacked, state=())
    with pytest.raises(UserError, match="would observe nothing"):
        probe(observation=PICTURE, images={})
    env, _ = probe(observation=both, state=("frames",))
    assert env.state_dim == 4 * 6 * 8 * 3
    env, _ = probe(observation=both, state=("goal",))
    assert env.state_dim == 1


def test_dict_observations_by_a_mapping() -> None:
    robot = spaces.Dict({"position": spaces.Box(0, 1, (2,)), "velocity": spaces.Box(0, 1, (3,)), "front": PICTURE})
    space = spaces.Dict({"robot": robot, "top": PICTURE, "goal": spaces.Box(0, 1, (1,))})
    env, _ = probe(observation=space)
    assert (env.state_dim, env.image_shapes) == (6, {"robot/front": (6, 8), "top": (6, 8)})
    env, _ = probe(observation=space, state=("robot/velocity", "goal"), images={"agentview": "robot/front"})
    last, obs = env._last[0], env.observe([0])
    assert env.image_shapes == {"agentview": (6, 8)}
    assert np.array_equal(obs.state[0], np.concatenate([last["robot"]["velocity"], last["goal"]]))
    assert np.array_equal(obs.images["agentview"][0], last["robot"]["front"])
    env, _ = probe(observation=space, images={})
    assert (env.state_dim, env.image_shapes) == (6, {})
    with pytest.raises(UserError, match=r"observes no 'goall'.*Did you mean 'goal'"):
        probe(observation=space, state=("goall",))
    with pytest.raises(UserError, match=r"images\.agentview: expected an image"):
        probe(observation=space, images={"agentview": "goal"})


def test_pixels_are_what_the_env_renders_at_the_size_asked_for() -> None:
    env, _ = probe(pixels=True, camera_height=5, camera_width=4)
    assert env.image_shapes == {"agentview": (5, 4)}
    assert np.array_equal(env.observe([0]).images["agentview"], np.full((1, 5, 4, 3), 7))
    assert env.render([0]).shape == (1, 10, 12, 3)
    assert env.control_hz == 12
    with pytest.raises(UserError, match="name it in images"):
        probe(observation=PICTURE, pixels=True)


def test_an_env_of_the_old_api_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    env, _ = probe()
    env._envs[0] = env._envs[0].unwrapped
    monkeypatch.setattr(Probe, "step", lambda self, action: (self.observation_space.sample(), 0.0, False, {}))
    with pytest.raises(UserError, match=r"step\(\) gives 4 values, expected \(obs, reward, terminated, trunc"):
        step(env, 0.5)
    monkeypatch.setattr(Probe, "reset", lambda self, seed=None, options=None: np.zeros(2))
    with pytest.raises(UserError, match=r"reset\(\) gives a ndarray, expected \(obs, info\)"):
        env.reset([0], [0])


@pytest.mark.parametrize("frame", [np.full((10, 12, 3), 0.5, np.float32), np.zeros((10, 12), np.uint8)])
def test_a_frame_that_is_no_picture_is_refused(frame: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from 0 to 1 would be a black video."""
    env, _ = probe()
    monkeypatch.setattr(Probe, "render", lambda _: frame)
    with pytest.raises(UserError, match=rf"render\(\) gives {frame.dtype} \[10, 12.*expected uint8 \[H, W, 3\]"):
        env.render([0])


def test_an_env_that_renders_nothing_says_so() -> None:
    env, _ = probe()
    env._envs[0].unwrapped.render_mode = None
    with pytest.raises(UserError, match=r"renders no rgb_array.*save_video=false"):
        env.render([0])


@pytest.mark.parametrize(
    ("info", "key", "success"),
    [
        ({}, None, False),
        ({"success": True}, None, True),
        ({"is_success": 1.0}, None, True),
        ({"success": False, "is_success": False}, None, False),
        ({"solved": True}, "solved", True),
        ({"success": True, "solved": False}, "solved", False),
    ],
)
def test_success_is_what_info_says(info: dict[str, Any], key: str | None, success: bool) -> None:
    env, _ = probe(info=info, success_key=key)
    outcome = step(env, 0)
    assert (outcome.success.tolist(), outcome.rewards.tolist()) == ([success], [2.5])


def test_whether_an_env_tells_success() -> None:
    for given, told in (({}, False), ({"success_return": 5.0}, True), ({"info": {"is_success": False}}, True)):
        env, _ = probe(**given)
        step(env, 0.5)
        assert env.tells_success is told


def test_a_success_key_that_info_lacks() -> None:
    env, _ = probe(info={"solved": True}, success_key="solve")
    with pytest.raises(UserError, match=r"no 'solve' in the info of a step. Did you mean 'solved'"):
        step(env, 0)


def test_a_pole_that_falls_terminates_and_a_horizon_truncates() -> None:
    env = GymnasiumEnv(2, GymnasiumParams(id="CartPole-v1", kwargs={"max_episode_steps": 5}), seed=0)
    env.reset([0, 1], [0, 1])
    ended = np.zeros((12, 2, 2), bool)
    for t in range(12):
        slots = [slot for slot in (0, 1) if not ended[:t, :, slot].any()]
        if not slots:
            break
        outcome = env.step(slots, np.array([[t % 2] if slot == 0 else [1] for slot in slots], np.float32))
        assert outcome.terminated is not None and outcome.truncated is not None
        ended[t][:, slots] = outcome.terminated, outcome.truncated
    assert ended[:, 1, 0].tolist().index(True) == 4, "cut by its own time limit"
    assert not ended[:, 0, 0].any()


def test_a_push_to_one_side_fails() -> None:
    env = GymnasiumEnv(1, GymnasiumParams(id="CartPole-v1"), seed=0)
    env.reset([0], [0])
    for _ in range(20):
        outcome = step(env, 1)
        assert outcome.terminated is not None and outcome.truncated is not None
        if outcome.terminated[0]:
            assert not outcome.truncated[0]
            assert not outcome.success[0]
            return
    raise AssertionError("the pole stands")


def test_pusht_succeeds_where_the_t_is_on_its_goal() -> None:
    pytest.importorskip("gym_pusht", reason="the extra for pusht is not installed")
    sim = GymnasiumEnv(2, GymnasiumParams(id="gym_pusht:gym_pusht/PushT-v0"), seed=0)
    assert (sim.action_dim, sim.action_choices, sim.state_dim) == (2, (), 5)
    sim.reset([0, 1], [7, 7])
    before = sim.observe([0, 1]).state
    assert np.array_equal(before[0], before[1])
    env: Any = sim._envs[1].unwrapped
    corner = (60.0, 60.0)
    env._set_state([*corner, *env.goal_pose])
    env.block.angle, env.block.position = env.goal_pose[2], tuple(env.goal_pose[:2])
    stay = (np.array([before[0, :2], corner]) / 256 - 1).astype(np.float32)
    step = sim.step([0, 1], stay)
    assert step.success.tolist() == [False, True]
    assert step.terminated is not None and step.terminated.tolist() == [False, True]
    assert step.rewards[1] == 1 > step.rewards[0]
    assert np.allclose(sim.observe([0]).state, before[0], atol=2), "the action is a place to go to"


def test_an_initial_state_is_a_seed_the_same_in_any_slot() -> None:
    env = GymnasiumEnv(3, GymnasiumParams(id="Pendulum-v1"), seed=5)
    env.reset([0, 1, 2], [9, 9, 8])
    states = env.observe([0, 1, 2]).state
    assert np.array_equal(states[0], states[1])
    assert not np.array_equal(states[0], states[2])
    expected, _ = gymnasium.make("Pendulum-v1").reset(seed=derived_seed(5, 9, bits=31))
    assert np.array_equal(states[0], expected)
    other = GymnasiumEnv(1, GymnasiumParams(id="Pendulum-v1"), seed=6)
    other.reset([0], [9])
    assert not np.array_equal(other.observe([0]).state[0], states[0])


def test_wrappers_the_outermost_last() -> None:
    env = GymnasiumEnv(
        1,
        GymnasiumParams(
            id="Pendulum-v1",
            wrappers=({"TimeAwareObservation": {"normalize_time": True}}, "gymnasium.wrappers:FlattenObservation"),
        ),
        seed=0,
    )
    assert env.state_dim == 4
    assert type(env._envs[0]).__name__ == "FlattenObservation"
    with pytest.raises(UserError, match=r"TimeAwareObservation cannot be put around Pendulum-v1 with \{'nosuch': 1\}"):
        GymnasiumEnv(1, GymnasiumParams(id="Pendulum-v1", wrappers=({"TimeAwareObservation": {"nosuch": 1}},)), seed=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"id": "Pendulm-v1"}, "no env 'Pendulm-v1'.*Did you mean 'Pendulum-v1'"),
        ({"id": "no_such_module:X-v0"}, "'no_such_module' cannot be imported"),
        ({"id": "math:X-v0"}, "no env 'X-v0' after importing 'math'"),
        ({"id": "no_such.py:X-v0"}, r"the file no_such\.py cannot be imported"),
        ({"wrappers": ("FlattenObservatio",)}, "Did you mean 'FlattenObservation'"),
        ({"wrappers": ("math:Nosuch",)}, "got 'math:Nosuch'"),
        ({"wrappers": ({"A": {}, "B": {}},)}, "one wrapper in each entry"),
    ],
)
def test_what_does_not_exist_is_found_without_an_env(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GymnasiumEnv.check(GymnasiumParams(**{"id": "CartPole-v1", **params}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class A(\n", r"cannot be imported: .*\(own\.py, line 1\)"),
        ("\nx = 1 / 0\n", r"cannot be imported: ZeroDivisionError: division by zero \(own\.py, line 2, in <module>\)"),
        ("class A: pass\n", r"no env 'A' after .*the class is there: gymnasium\.register\('A-v0', entry_point=A\)"),
    ],
)
def test_a_file_of_ones_own_with_a_slip(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"env\.init_params\.id: got 'own\.py:A', but .*{message}"):
        GymnasiumEnv.check(GymnasiumParams(id="own.py:A"))
    if "0" in text:
        with pytest.raises(UserError, match=rf"env\.init_params\.wrappers: got 'own\.py:W', but .*{message}"):
            GymnasiumEnv.check(GymnasiumParams(id="CartPole-v1", wrappers=("own.py:W",)))


def test_arguments_that_an_env_does_not_take() -> None:
    with pytest.raises(
        UserError, match=r"env\.init_params\.kwargs: Pendulum-v1 cannot be made with {'gravitation': 3}"
    ):
        GymnasiumEnv(1, GymnasiumParams(id="Pendulum-v1", kwargs={"gravitation": 3}), seed=0)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [("CartPole-v1", "cart pole"), ("gymnasium:CartPole-v1", "cart pole"), ("tests/Probe-v0", "probe")],
)
def test_the_id_is_the_instruction_unless_there_is_one(env_id: str, words: str) -> None:
    assert GymnasiumEnv(1, GymnasiumParams(id=env_id), seed=0).task(3).instruction == words
    env = GymnasiumEnv(1, GymnasiumParams(id=env_id, instruction="do it"), seed=0)
    assert env.task(3).instruction == "do it"
    assert env.task(0).task_id == 0


def test_a_picture_of_mujoco_is_the_same_after_another_env_came_and_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium renders into whichever context is current."""
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    params = GymnasiumParams(id="HalfCheetah-v5")
    env = GymnasiumEnv(2, params, seed=0)
    env.reset([0, 1], [0, 1])
    before = env.render([0, 1])
    other = GymnasiumEnv(1, params, seed=0)
    other.reset([0], [0])
    other.render([0])
    other.close()
    after = env.render([0, 1])
    env.close()
    assert before.min() < before.max()
    np.testing.assert_array_equal(after, before)
