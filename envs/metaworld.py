"""Meta-World: fifty manipulation tasks of a Sawyer arm in MuJoCo, with a scripted expert for each.

Yu et al., "Meta-World: A Benchmark and Evaluation for Multi-Task and Meta Reinforcement Learning", arXiv:1910.10897;
McLean et al., "Meta-World+", arXiv:2505.11289, whose tasks (v3) these are. See docs/metaworld.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveInt

from embodied_rl.envs.base import SimEnv, SimObs, SimStep, Task, check_actions, check_choices, check_reset_state
from embodied_rl.envs.meshes import coarsen_meshes
from embodied_rl.envs.rendering import explain_missing, quiet, require_renderer
from embodied_rl.errors import UserError
from embodied_rl.params import OF_THE_MACHINE, OF_THE_REWARD
from embodied_rl.seeding import derived_seed

INSTRUCTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "easy": {
        "button-press": "Press a button",
        "button-press-topdown": "Press a button from the top",
        "button-press-topdown-wall": "Bypass a wall and press a button from the top",
        "button-press-wall": "Bypass a wall and press a button",
        "coffee-button": "Push a button on the coffee machine",
        "dial-turn": "Rotate a dial 180 degrees",
        "door-close": "Close a door with a revolving joint",
        "door-lock": "Lock the door by rotating the lock clockwise",
        "door-open": "Open a door with a revolving joint",
        "door-unlock": "Unlock the door by rotating the lock counter-clockwise",
        "drawer-close": "Push and close a drawer",
        "drawer-open": "Open a drawer",
        "faucet-close": "Rotate the faucet clockwise",
        "faucet-open": "Rotate the faucet counter-clockwise",
        "handle-press": "Press a handle down",
        "handle-press-side": "Press a handle down sideways",
        "handle-pull": "Pull a handle up",
        "handle-pull-side": "Pull a handle up sideways",
        "lever-pull": "Pull a lever down 90 degrees",
        "peg-unplug-side": "Unplug a peg sideways",
        "plate-slide": "Slide a plate into a cabinet",
        "plate-slide-back": "Get a plate from the cabinet",
        "plate-slide-back-side": "Get a plate from the cabinet sideways",
        "plate-slide-side": "Slide a plate into a cabinet sideways",
        "reach": "Reach a goal position",
        "reach-wall": "Bypass a wall and reach a goal",
        "window-close": "Push and close a window",
        "window-open": "Push and open a window",
    },
    "medium": {
        "basketball": "Dunk the basketball into the basket",
        "bin-picking": "Grasp the puck from one bin and place it into another bin",
        "box-close": "Grasp the cover and close the box with it",
        "coffee-pull": "Pull a mug from a coffee machine",
        "coffee-push": "Push a mug under a coffee machine",
        "hammer": "Hammer a screw on the wall",
        "peg-insert-side": "Insert a peg sideways",
        "push-wall": "Bypass a wall and push a puck to a goal",
        "soccer": "Kick a soccer into the goal",
        "sweep": "Sweep a puck off the table",
        "sweep-into": "Sweep a puck into a hole",
    },
    "hard": {
        "assembly": "Pick up a nut and place it onto a peg",
        "hand-insert": "Insert the gripper into a hole",
        "pick-out-of-hole": "Pick up a puck from a hole",
        "pick-place": "Pick and place a puck to a goal",
        "push": "Push the puck to a goal",
        "push-back": "Pull a puck to a goal",
    },
    "very_hard": {
        "disassemble": "Pick a nut out of a peg",
        "pick-place-wall": "Pick a puck, bypass a wall and place the puck",
        "shelf-place": "Pick and place a puck onto a shelf",
        "stick-pull": "Grasp a stick and pull a box with the stick",
        "stick-push": "Grasp a stick and push a box using the stick",
    },
}
"""Level -> task -> instruction. Levels: Seo et al., "Masked World Models for Visual Control", arXiv:2206.14244; words:
Meta-World's appendix."""
TASKS: Final = {task: level for level, tasks in INSTRUCTIONS.items() for task in tasks}
"""Task -> level, in the order in which ``mt50`` numbers them."""
MT10: Final = (
    *("reach", "push", "pick-place", "door-open", "drawer-open", "drawer-close", "button-press-topdown"),
    *("peg-insert-side", "window-open", "window-close"),
)
CAMERAS: Final = ("corner2", "corner", "corner3", "topview", "behindGripper", "gripperPOV")
_NAME: Final = "Metaworld"
_HAND: Final = 4
"""Numbers of an observation that the robot knows of itself."""
_CORNER2: Final = (0.75, 0.075, 0.7)
"""Where LeRobot's and RLinf's pictures are taken from, nearer than Meta-World's own."""
_UPSIDE_DOWN: Final = ("corner2", "corner", "corner3")
"""Cameras that Meta-World mounts upside down."""
_MAX_REWARD: Final = 10.0
_NOISE: Final = 0.2
"""Standard deviation of the noise on each of an expert's translations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaworldParams:
    """Parameters of :class:`MetaworldEnv`."""

    task: str | tuple[str, ...]
    """One of :data:`TASKS`, several, mt10 or mt50."""
    cameras: tuple[str, ...] = ("corner2",)
    """Names from :data:`CAMERAS`; none makes a state-only env."""
    camera_height: PositiveInt = 128
    """Height in pixels of every camera's images."""
    camera_width: PositiveInt = 128
    """Width in pixels of every camera's images."""
    render_height: PositiveInt = field(default=256, metadata=OF_THE_MACHINE)
    """Height in pixels of video frames."""
    render_width: PositiveInt = field(default=256, metadata=OF_THE_MACHINE)
    """Width in pixels of video frames."""
    draft: bool = True
    """Pictures of coarser meshes, without shadows, mirrors and smooth edges, which a software renderer draws fifteen
    to twenty times as fast."""
    object_state: bool = False
    """The state is the whole observation [39]: hand, objects, the same a step ago, goal. False: hand and gripper alone
    [4]."""
    reward: Literal["dense", "success"] = field(default="dense", metadata=OF_THE_REWARD)
    """The reward level. dense: Meta-World's reward (0 to 10) over 10, counted from the initial state. success: 1 while
    the goal holds, else 0."""
    success_bonus: NonNegativeFloat = field(default=0.0, metadata=OF_THE_REWARD)
    """``reward: dense`` alone: what the level is higher by while the goal holds. Of some tasks, such as
    button-press-topdown, Meta-World's reward hardly tells success from failure."""
    states_per_task: PositiveInt = 1000
    """Initial states of each task."""

    def __post_init__(self) -> None:
        if isinstance(self.task, str):
            check_choices("task", [self.task], [*TASKS, "mt10", "mt50"])
        else:
            check_choices("task", self.task, TASKS)
        if not self.tasks:
            raise ValueError("task: got an empty list, expected a task, several, mt10 or mt50")
        if self.success_bonus and self.reward == "success":
            raise ValueError(
                f"success_bonus: got {self.success_bonus:g} with reward=success, which is the goal alone; set 0, or "
                "reward=dense"
            )
        check_choices("cameras", self.cameras, CAMERAS)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Their names, by task id."""
        if isinstance(self.task, str):
            return {"mt10": MT10, "mt50": tuple(TASKS)}.get(self.task, (self.task,))
        return self.task


@dataclass(slots=True)
class _Slot:
    task: str
    scene: Any
    """Meta-World's env (``SawyerXYZEnv``)."""
    obs: NDArray[np.float64]
    """[39]."""
    first_reward: float


class MetaworldEnv:
    """Meta-World tasks behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    Action [4] in [-1, 1], values outside are clipped: translation of the hand (3, ±1 is ±1 cm) and gripper (positive
    closes). State: ``MetaworldParams.object_state``. An initial state is a function of (``seed``, task, its number
    within the task), and an episode one of that and its actions. A task's ``suite`` is its level.

    Scenes live in the thread that first rendered them: use a process's envs in one thread.

    Raises:
        SimulatorMissingError: Meta-World or a graphics library is not installed.
    """

    Params: ClassVar[type] = MetaworldParams
    packages = ("mujoco", "metaworld")
    batched = False
    control_hz = 80.0
    action_dim = 4

    def __init__(self, num_slots: int, params: MetaworldParams, seed: int) -> None:
        self._classes = _import_metaworld()
        if params.cameras:
            require_renderer(_NAME)
        self._params, self._seed = params, seed
        self.state_dim = 39 if params.object_state else _HAND
        self.num_reset_states = len(params.tasks) * params.states_per_task
        self.image_shapes = self.image_shapes_of(params)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._idle: list[tuple[str, Any]] = []
        """Scenes that no slot has, with their tasks; what was left longest ago comes first."""
        self._painters: OrderedDict[tuple[str, int, int], _Painter] = OrderedDict()

    @staticmethod
    def image_shapes_of(params: MetaworldParams) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(params.cameras, (params.camera_height, params.camera_width))

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        task_id = int(reset_state_id) // self._params.states_per_task
        name = self._params.tasks[task_id]
        return Task(task_id=task_id, instruction=INSTRUCTIONS[TASKS[name]][name], suite=TASKS[name])

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        mujoco: Any = importlib.import_module("mujoco")
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            name = self._params.tasks[self.task(reset_state_id).task_id]
            trial = int(reset_state_id) % self._params.states_per_task
            scene = self._scene(slot, name)
            # By the task's name, so that a state is the same one whichever other tasks are played.
            scene.seed(derived_seed(self._seed, list(TASKS).index(name), trial, bits=31))
            with quiet():
                scene.reset()
                mujoco.mj_forward(scene.model, scene.data)  # Windows and levers would be seen where they were before.
                scene._prev_obs = scene._get_curr_obs_combined_no_goal()
                obs = scene._get_obs()
                first, _ = scene.evaluate_state(obs, np.zeros(self.action_dim))
            self._slots[slot] = _Slot(name, scene, obs, float(first))

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        rewards = np.empty(len(slots), dtype=np.float32)
        success = np.empty(len(slots), dtype=np.bool_)
        for row, (slot, action) in enumerate(zip(slots, np.clip(actions, -1.0, 1.0), strict=True)):
            state = self._state_of(slot)
            state.scene.curr_path_length = 0  # The horizon is not the simulator's business.
            state.obs, reward, _, _, info = state.scene.step(action.astype(np.float64))
            success[row] = info["success"] > 0
            dense = (float(reward) - state.first_reward) / _MAX_REWARD + self._params.success_bonus * success[row]
            rewards[row] = dense if self._params.reward == "dense" else success[row]
        return SimStep(rewards=rewards, success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        images = {
            camera: np.stack([self._picture(slot, camera, height, width) for slot in slots])
            for camera, (height, width) in self.image_shapes.items()
        }
        states = [self._state_of(slot).obs[: self.state_dim] for slot in slots]
        return SimObs(images=images, state=np.array(states, dtype=np.float32))

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n, render_height, render_width, 3]: the camera corner2."""
        size = (self._params.render_height, self._params.render_width)
        return np.stack([self._picture(slot, "corner2", *size) for slot in slots])

    def privileged(self, slot: int) -> tuple[str, NDArray[np.float64]]:
        """The task in a slot and Meta-World's whole observation [39], for scripted experts."""
        state = self._state_of(slot)
        return state.task, state.obs

    def release(self) -> None:
        """Free the rendering contexts."""
        for painter in self._painters.values():
            painter.close()
        self._painters.clear()

    def close(self) -> None:
        self.release()
        self._slots = [None] * len(self._slots)
        self._idle.clear()

    def _state_of(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise RuntimeError(f"slot {slot} has no episode; call reset([{slot}], [reset_state_id]) first")
        return state

    def _scene(self, slot: int, task: str) -> Any:
        """The slot's own scene of a task: the one that it has, or one that another slot left, or a new one."""
        state = self._slots[slot]
        if state is not None and state.task == task:
            return state.scene
        if state is not None:
            self._idle.append((state.task, state.scene))
        for number, (left, scene) in enumerate(self._idle):
            if left == task:
                del self._idle[number]
                return scene
        # Of each task for each slot would be too many: fifty slots and ten tasks took 8 GB.
        del self._idle[: -len(self._slots)]
        with quiet():
            scene = self._classes[f"{task}-v3"]()
        # As Meta-World's MT benchmarks: the goal is seen, and every reset draws from the seed.
        scene._partially_observable, scene._freeze_rand_vec, scene._set_task_called = False, False, True
        scene.seeded_rand_vec = True
        del scene.sawyer_observation_space  # a cached property, whose bounds hide the goal
        scene.model.cam_pos[scene.model.camera("corner2").id] = _CORNER2
        return scene

    def _picture(self, slot: int, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """[height, width, 3]. Scenes of a task share what draws them."""
        state, key = self._state_of(slot), (self._state_of(slot).task, height, width)
        if key not in self._painters:
            while len(self._painters) >= _MAX_PAINTERS:
                self._painters.popitem(last=False)[1].close()
            self._painters[key] = _Painter(state.scene.model, height, width, self._params.draft)
        self._painters.move_to_end(key)
        pixels = self._painters[key].draw(state.scene.data, camera)
        return np.ascontiguousarray(pixels[::-1, ::-1] if camera in _UPSIDE_DOWN else pixels)


_MAX_PAINTERS: Final = 12
"""Rendering contexts that an env keeps; the least recently used one makes room."""


class _Painter:
    """Draws the scenes of one task, in one size."""

    def __init__(self, model: Any, height: int, width: int, draft: bool) -> None:
        mujoco: Any = importlib.import_module("mujoco")
        self._draft = draft
        if draft:
            model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
            coarsen_meshes(model)
        model.vis.global_.offheight = max(model.vis.global_.offheight, height)
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
        with explain_missing(_NAME), quiet():
            self._renderer = mujoco.Renderer(model, height, width)
        self._flags = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION)
        self.close = weakref.finalize(self, _free, self._renderer)
        """Also called when nothing holds the painter any more."""
        # At exit before the EGL display is closed: what is registered last is called first.
        atexit.register(self.close)

    def draw(self, data: Any, camera: str) -> NDArray[np.uint8]:
        self._renderer.update_scene(data, camera=camera)
        if self._draft:
            for flag in self._flags:
                self._renderer.scene.flags[flag] = 0
        return self._renderer.render()


def _free(renderer: Any) -> None:
    # Its objects are freed in whichever context is current, where they could be another painter's.
    renderer._gl_context.make_current()
    renderer.close()


@functools.cache
def _import_metaworld() -> Mapping[str, Any]:
    """Meta-World's classes by the tasks' names.

    Raises:
        SimulatorMissingError: with the command that installs it.
    """
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    with explain_missing(_NAME), quiet():
        base: Any = importlib.import_module("metaworld.sawyer_xyz_env").SawyerMocapBase
        base.reset_mocap_welds = _reset_mocap_welds
        return importlib.import_module("metaworld.env_dict").ENV_CLS_MAP


def _reset_mocap_welds(scene: Any) -> None:
    """What Meta-World's method of this name does, which MuJoCo's releases after 3.3 refuse: rows of ``eq_data`` have
    had 11 numbers, and have 12."""
    mujoco: Any = importlib.import_module("mujoco")
    welds = scene.model.eq_type == mujoco.mjtEq.mjEQ_WELD
    scene.model.eq_data[welds, :11] = (0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 5)


class MetaworldExpert:
    """Meta-World's own scripted policies (the :class:`~embodied_rl.demonstrations.expert.Expert` protocol)."""

    def __init__(self, env: SimEnv) -> None:
        if not isinstance(env, MetaworldEnv):
            raise UserError(
                f"MetaworldExpert: got a {type(env).__name__}, expected a MetaworldEnv: it plays env_type metaworld"
            )
        self._env = env
        with _without_warnings():
            self._known = importlib.import_module("metaworld.policies").ENV_POLICY_MAP
        self._policies: dict[int, Any] = {}

    def reset(self, slot: int) -> None:
        self._policies[slot] = self._known[f"{self._env.privileged(slot)[0]}-v3"]()

    def act(self, slot: int, generator: np.random.Generator | None) -> NDArray[np.float32]:
        if slot not in self._policies:
            raise RuntimeError(f"act: the expert has no episode in slot {slot}; call reset({slot}) first")
        with _without_warnings():  # "Constant(s) may be too high", at every other step
            action = np.asarray(self._policies[slot].get_action(self._env.privileged(slot)[1]), dtype=np.float64)
        if generator is not None:
            action[:3] = np.clip(action[:3], -1, 1) + generator.normal(0.0, _NOISE, 3)
        return np.clip(action, -1, 1).astype(np.float32)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
