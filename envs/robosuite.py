"""robosuite: a Panda arm in MuJoCo and eleven tasks.

Zhu et al., "robosuite: A Modular Simulation Framework and Benchmark for Robot Learning", arXiv:2009.12293. See
docs/robosuite.md. Runs on robosuite 1.4.0, which LIBERO needs too, and on 1.5.2.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.base import SeededParams, SimObs, SimStep, Task, check_actions, check_choices, check_reset_state
from embodied_rl.envs.rendering import (
    SimulatorMissingError,
    importing_robosuite,
    quiet,
    render_context,
    require_renderer,
)
from embodied_rl.params import OF_THE_REWARD
from embodied_rl.seeding import derived_seed, generator

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "Door": "open the door",
    "NutAssembly": "put both nuts on their pegs",
    "NutAssemblyRound": "put the round nut on its peg",
    "NutAssemblySquare": "put the square nut on its peg",
    "PickPlace": "put everything into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCan": "put the can into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "PickPlaceMilk": "put the milk into its bin",
}
"""robosuite's name of each task -> the instruction for language policies."""
UNPLAYED: Final = {
    "NutAssemblySingle": "an instruction for each episode: it draws one of the two nuts",
    "PickPlaceSingle": "an instruction for each episode: it draws one of the four objects",
    "TwoArmHandover": "a policy for two arms",
    "TwoArmLift": "a policy for two arms",
    "TwoArmPegInHole": "a policy for two arms",
    "Wipe": "a gripper that wipes",
}
"""Registered tasks that cannot be played here -> what they need."""
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand", "frontview": "frontview"}
"""Our camera name -> robosuite's."""

_NAME: Final = "robosuite"


@dataclass(frozen=True, slots=True, kw_only=True)
class RobosuiteParams(SeededParams):
    """Parameters of :class:`RobosuiteEnv`."""

    task: str
    """One of :data:`INSTRUCTIONS`."""
    cameras: tuple[str, ...] = ()
    """Names from :data:`CAMERAS`; none makes a state-only env."""
    object_state: bool = True
    """The state holds the objects' poses, too; false: only what the robot knows of itself."""
    reward_shaping: bool = field(default=True, metadata=OF_THE_REWARD)
    """robosuite's dense reward, counted from the initial state; false: 1 while the task is solved, else 0."""

    def __post_init__(self) -> None:
        if self.task in UNPLAYED:
            raise ValueError(f"task: {self.task} needs {UNPLAYED[self.task]}. Take one of {', '.join(INSTRUCTIONS)}")
        check_choices("task", [self.task], INSTRUCTIONS)
        check_choices("cameras", self.cameras, CAMERAS)


class RobosuiteEnv:
    """A robosuite task behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    Action [7] in [-1, 1], values outside are clipped: OSC_POSE deltas and gripper, as in LIBERO. State: robosuite's
    ``robot0_proprio-state`` and ``object-state``. An initial state is a function of (``seed``, reset state id), and an
    episode one of that and its actions. Objects' sizes, which robosuite draws when it builds a scene, depend on
    ``seed`` alone.

    Rendering contexts live in the thread that first rendered: use a process's envs in one thread.

    Raises:
        SimulatorMissingError: robosuite or a graphics library is not installed, or it does not run with this MuJoCo.
    """

    Params: ClassVar[type] = RobosuiteParams
    packages = ("mujoco", "robosuite")
    batched = False
    control_hz = 20.0
    action_dim = 7

    def __init__(self, num_slots: int, params: RobosuiteParams, seed: int) -> None:
        self._suite = import_robosuite()
        if params.cameras:
            require_renderer(_NAME)
        self._params, self._seed = params, seed
        self.num_reset_states = params.num_reset_states
        self._task = Task(task_id=0, instruction=INSTRUCTIONS[params.task], suite="robosuite")
        self.image_shapes = self.image_shapes_of(params)
        self._envs = [self._build() for _ in range(num_slots)]
        self.state_dim = len(self._state_of(self._envs[0]._get_observations(force_update=True)))
        self._state = np.zeros((num_slots, self.state_dim), dtype=np.float32)
        self._first_reward = np.zeros(num_slots, dtype=np.float32)

    @staticmethod
    def image_shapes_of(params: RobosuiteParams) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(params.cameras, (params.camera_height, params.camera_width))

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        return self._task

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self.task(reset_state_id)
            env = self._envs[slot]
            with _seeded((self._seed, reset_state_id), env):
                for robot in env.robots:
                    for gripper in robot.gripper.values() if isinstance(robot.gripper, dict) else [robot.gripper]:
                        gripper.current_action = np.zeros(gripper.dof)  # A soft reset forgets this one.
                obs = env.reset()
            self._state[slot] = self._state_of(obs)
            if self._params.reward_shaping:
                self._first_reward[slot] = env.reward(np.zeros(self.action_dim))

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        rewards = np.empty(len(slots), dtype=np.float32)
        success = np.empty(len(slots), dtype=np.bool_)
        for row, (slot, action) in enumerate(zip(slots, np.clip(actions, -1.0, 1.0), strict=True)):
            obs, rewards[row], _, _ = self._envs[slot].step(action.astype(np.float64))
            success[row] = self._envs[slot]._check_success()
            self._state[slot] = self._state_of(obs)
        return SimStep(rewards=rewards - self._first_reward[list(slots)], success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        images = {
            camera: np.stack([self._picture(slot, CAMERAS[camera], height, width) for slot in slots])
            for camera, (height, width) in self.image_shapes.items()
        }
        return SimObs(images=images, state=self._state[list(slots)])

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n, render_height, render_width, 3]: the agentview camera."""
        size = (self._params.render_height, self._params.render_width)
        return np.stack([self._picture(slot, "agentview", *size) for slot in slots])

    def release(self) -> None:
        """Free the rendering contexts."""
        for env in self._envs:
            if env.sim._render_context_offscreen is not None:
                # It frees what its numbers mean in the *current* OpenGL context, which could be another env's.
                env.sim._render_context_offscreen.gl_ctx.make_current()
                env.sim._render_context_offscreen = None

    def close(self) -> None:
        self.release()
        for env in self._envs:
            env.close()
        self._envs = []

    def _build(self) -> Any:
        """A robosuite env of its own for each slot, which renders nothing by itself."""
        if hasattr(self._suite, "load_controller_config"):
            controller = self._suite.load_controller_config(default_controller="OSC_POSE")
        else:  # robosuite 1.5: OSC_POSE is what its Panda has by default.
            controller = self._suite.load_composite_controller_config(controller="BASIC")
        with _seeded((self._seed,)), quiet():
            return self._suite.make(
                self._params.task,
                robots="Panda",
                controller_configs=controller,
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                reward_shaping=self._params.reward_shaping,
                control_freq=int(self.control_hz),
                ignore_done=True,  # The horizon is not the simulator's business.
                hard_reset=False,  # A hard one compiles the scene again, which takes seconds.
            )

    def _state_of(self, obs: Mapping[str, Any]) -> NDArray[np.float32]:
        parts = ["robot0_proprio-state", "object-state"][: 2 if self._params.object_state else 1]
        return np.concatenate([np.ravel(obs[part]) for part in parts]).astype(np.float32)

    def _picture(self, slot: int, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        sim: Any = self._envs[slot].sim
        context = sim._render_context_offscreen
        if not context:
            params = self._params
            largest = max(params.camera_height, params.render_height), max(params.camera_width, params.render_width)
            sim.forward = lambda: (
                None
            )  # In an episode's middle it would move what is seen, and the solver's warm start.
            try:
                context = render_context(_NAME, sim, *largest)
            finally:
                del sim.forward
        context.gl_ctx.make_current()  # Every env has a context of its own.
        return np.ascontiguousarray(sim.render(width=width, height=height, camera_name=camera)[::-1])


def import_robosuite() -> Any:
    """The package ``robosuite``, after a look at what it would fail on later."""
    with importing_robosuite(_NAME):
        suite, mujoco = importlib.import_module("robosuite"), importlib.import_module("mujoco")
    if _version(suite) >= (1, 5) and _version(mujoco) >= (3, 10):
        raise SimulatorMissingError(
            f"robosuite {suite.__version__} does not run with MuJoCo {mujoco.__version__}, only with 3.3 to 3.9: "
            "pip install robosuite==1.4.0 for this MuJoCo (LIBERO needs that release, too), or 'mujoco<3.10' for this "
            "robosuite"
        )
    if _version(suite) < (1, 5):
        _bridge(mujoco)
    return suite


def _bridge(mujoco: Any) -> None:
    """Let robosuite 1.4 run on MuJoCo releases whose Python interface has changed since. No equation changes."""
    controllers: Any = importlib.import_module("robosuite.controllers.base_controller")
    bindings: Any = importlib.import_module("robosuite.utils.binding_utils")
    # It looks for numpy integers in tuples of enumerators, among which only Python's are found by now.
    bindings.MjModel.jnt_type = property(lambda self: self._model.jnt_type.tolist())
    if not hasattr(mujoco.MjData, "qM"):
        # mj_fullM took (model, matrix, data.qM); it takes (model, data, matrix).
        bindings.MjData.qM = property(lambda self: self._data)
        controllers.mujoco = SimpleNamespace(mj_fullM=lambda model, matrix, data: mujoco.mj_fullM(model, data, matrix))


def _version(package: Any) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", package.__version__)[:2]
    return int(major), int(minor)


@contextlib.contextmanager
def _seeded(key: tuple[int, ...], env: Any = None) -> Iterator[None]:
    """Let robosuite draw from ``key`` and leave numpy's global generator, which 1.4 draws from, as it was."""
    before = np.random.get_state()
    np.random.seed(derived_seed(*key, bits=32))
    if hasattr(env, "rng"):  # robosuite 1.5: one generator that its parts share, so it is set in place.
        env.rng.bit_generator.state = generator(*key).bit_generator.state
    try:
        yield
    finally:
        np.random.set_state(before)
