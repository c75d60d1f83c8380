"""One LIBERO scene, played by any number of slots in turn.

A scene is expensive (seconds to build, hundreds of megabytes), a slot's state is a few kilobytes. So all slots of a
process that play the same task share one scene: a :class:`Snapshot` holds everything that distinguishes them, and the
scene's methods take a snapshot and give the next one. Trajectories are bit-identical to those of a LIBERO environment
of one's own, however the slots interleave.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs.libero import NAME, import_libero
from embodied_rl.envs.libero.compiled import kept_models, user_cache
from embodied_rl.envs.libero.culling import Culling, drawn_textures
from embodied_rl.envs.libero.placements import drawn_state, heights
from embodied_rl.envs.libero.progress import Progress
from embodied_rl.envs.libero.subgoals import SubGoals
from embodied_rl.envs.meshes import coarsen_meshes
from embodied_rl.envs.rendering import quiet, render_context
from embodied_rl.errors import UserError

DENSE_REWARDS: Final[Mapping[str, Callable[[Any], DenseReward]]] = {"progress": Progress, "subgoals": SubGoals}
"""Of LIBERO's problem environment, which they watch."""

_PLACEMENT_SEED = 0
"""The seed that published evaluations pass to ``env.seed``. It places the fixtures, which initial states leave out."""
_OBSERVED_SUBSTEP = 23
"""The physics step (of 25 in a control step, from 0) during which robosuite's observables sample after a reset and a
``set_init_state``, whose forced updates shift their clock. So what LIBERO's own environments return, and what published
policies were trained on, is the scene 4 ms before the end of the control step."""
_DRAWS = 20
_TYPICAL = 5
"""Published states that say at which height each object rests; in one of fifty one may have fallen."""
_AS_USUAL = 0.02
"""Metres."""
_IDLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""The action of published evaluations while the objects settle."""


class DenseReward(Protocol):
    """Watches a simulation."""

    def level(self) -> float:
        """0 to 1, how near the goal is now; 1 where it holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSpec:
    """The task and the pictures of a scene; equal specs share a scene."""

    bddl_file: str
    """The task's definition."""
    draft: bool
    """Pictures of lower quality."""
    max_height: int
    """Height in pixels of the largest image; so much is allocated."""
    max_width: int
    cache: bool = True
    """Read the compiled model from the user's cache directory, or leave it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The last reading of cameras and sensors."""

    qpos: NDArray[np.float64]
    """[nq], the joint positions that the picture shows."""
    eef_pos: NDArray[np.float64]
    """[3] metres."""
    eef_quat: NDArray[np.float64]
    """[4], w x y z."""
    gripper_qpos: NDArray[np.float64]
    """[2] metres."""
    site_rgba: NDArray[np.float32]
    """[nsite,4]; a stove shows by a site's colour that it is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a slot's future depends on. Never changed, so it can be kept and resumed from more than once."""

    physics: NDArray[np.float64]
    """MuJoCo's integration state: time, positions, velocities, controls, applied forces and the solver's warm start."""
    goal: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    """[3] metres and [3,3], place and axes that the controller moves the hand to; None before the first step."""
    fingers: NDArray[np.float64]
    """[2] in [-1, 1], the gripper's command."""
    site_rgba: NDArray[np.float32]
    """[nsite,4]."""
    view: View


class Scene:
    """A task's simulation.

    Args:
        spec: what to build.

    Raises:
        SimulatorMissingError: LIBERO or a graphics library is not installed.
    """

    def __init__(self, spec: SceneSpec) -> None:
        import_libero()
        import mujoco
        from libero.libero.envs.env_wrapper import ControlEnv

        from embodied_rl.envs.libero.control import Controller

        self._mujoco: Any = mujoco
        self._spec = spec
        numpy_random = np.random.get_state()
        try:
            with quiet(), kept_models(user_cache() if spec.cache else None):
                control_env = ControlEnv(
                    bddl_file_name=spec.bddl_file,
                    use_camera_obs=False,
                    has_offscreen_renderer=False,
                    hard_reset=False,
                    ignore_done=True,
                )
                self._control_env, self._env = control_env, control_env.env
                self._place()
        finally:
            np.random.set_state(numpy_random)
        self._sim = self._env.sim
        self._model, self._data = self._sim.model._model, self._sim.data._data
        # No goal or controller of LIBERO's reads a sensor, and no sensor acts on the physics.
        self._model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR  # type: ignore[attr-defined]
        robot = self._robot = self._env.robots[0]
        self._controller = Controller(robot, self._sim)
        self._dense: dict[str, DenseReward] = {}
        self._eef_body = self._sim.model.body_name2id(robot.robot_model.eef_name)
        self._gripper_qpos = list(robot._ref_gripper_joint_pos_indexes)
        self._physics_size = self._mujoco.mj_stateSize(self._model, self._mujoco.mjtState.mjSTATE_INTEGRATION)
        self._substeps = int(self._env.control_timestep / self._env.model_timestep)
        self._context: Any = None
        self._culling: Any = None
        self._settled: dict[tuple[bytes, int], Snapshot] = {}
        self._drawn: dict[tuple[int, int, bool], NDArray[np.float64]] = {}
        self._current: Snapshot | None = None
        self._after_reset = self._save(self._look())
        give_memory_back()

    def start(self, init_state: NDArray[np.float64], settle_steps: int) -> Snapshot:
        """An episode's start: ``init_state`` (time, qpos, qvel as LIBERO ships them), then idle steps."""
        key = (init_state.tobytes(), settle_steps)
        if key not in self._settled:
            self._load(self._after_reset)
            self._control_env.set_init_state(init_state)
            snapshot = self._save(self._look())
            for _ in range(settle_steps):
                snapshot, _ = self.step(snapshot, _IDLE_ACTION)
            self._settled[key] = snapshot
        return self._settled[key]

    def drawn(
        self, published: NDArray[np.float64], number: int, settle_steps: int, *, exchange: bool = False
    ) -> NDArray[np.float64]:
        """[1+nq+nv]: one of the ``published`` states with objects placed anew, as LIBERO's reset places them; a
        function of the scene's file and the arguments. Where one comes to rest higher or lower than usual, on another
        or fallen over, all are placed again.

        Args:
            published: [states,1+nq+nv].
            number: of the draw.
            settle_steps: as for :meth:`start`.
            exchange: objects may stand in each other's regions.

        Raises:
            UserError: they find no room, or none of many draws is at rest as usual.
        """
        known = number, settle_steps, exchange
        if known in self._drawn:
            return self._drawn[known]

        def at_rest(state: NDArray[np.float64]) -> NDArray[np.float64]:
            return heights(self._env, self.start(state, settle_steps).physics[1:])

        usual = np.median([at_rest(state) for state in published[:_TYPICAL]], axis=0)
        file = Path(self._spec.bddl_file)
        key = f"{file.parent.name}/{file.stem} {number}"
        for attempt in range(_DRAWS):
            self._load(self._after_reset)
            self._current = None
            state = drawn_state(self._env, published[number % len(published)], f"{key} {attempt}", exchange=exchange)
            if np.abs(at_rest(state) - usual).max(initial=0.0) < _AS_USUAL:
                self._drawn[known] = state
                return state
            del self._settled[state.tobytes(), settle_steps]
        option = "exchange_places=false" if exchange else "drawn_states=0"
        raise UserError(
            f"{key}: in {_DRAWS} draws objects never came to rest as published ones do; set env.init_params.{option}"
        )

    def step(self, snapshot: Snapshot, action: NDArray[np.floating]) -> tuple[Snapshot, bool]:
        """One control step of 50 ms: the state after it, and whether the task's goal holds there.

        Does what robosuite's ``env.step`` does, to the last bit, but computes the dynamics once per physics step, not
        three times, the controller without its look-ups, and no observables.
        """
        mujoco, model, data, controller = self._mujoco, self._model, self._data, self._controller
        self._load(snapshot)
        self._current = None
        action = np.asarray(action, dtype=np.float64)
        view = snapshot.view
        for substep in range(self._substeps):
            qpos = data.qpos.copy() if substep == _OBSERVED_SUBSTEP else None
            mujoco.mj_step1(model, data)
            if substep == 0:
                controller.begin(action)
            else:
                controller.hold(action[-1])
            mujoco.mj_step2(model, data)
            if qpos is not None:
                view = self._look(qpos)
        success = bool(self._env._check_success())
        self._env._post_process()
        return self._save(view), success

    def nearness_at(self, snapshot: Snapshot, reward: str) -> float:
        """Nearness to the goal in ``snapshot``, 0 to 1, as the dense ``reward`` sees it."""
        self.expose(snapshot)
        return self.nearness(reward)

    def nearness(self, reward: str) -> float:
        """Nearness to the goal after the step that was just made, 0 to 1."""
        if reward not in self._dense:
            self._dense[reward] = DENSE_REWARDS[reward](self._env)
        return self._dense[reward].level()

    def proprioception(self, snapshot: Snapshot) -> NDArray[np.float32]:
        """[8]: end-effector position (m), axis-angle (rad), gripper joint positions (m)."""
        from robosuite.utils.transform_utils import quat2axisangle

        view = snapshot.view
        return np.concatenate([view.eef_pos, quat2axisangle(view.eef_quat[[1, 2, 3, 0]]), view.gripper_qpos]).astype(
            np.float32
        )

    def image(self, snapshot: Snapshot, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """[height,width,3], upright: robosuite's picture turned by 180 degrees."""
        if self._context is None:
            self._context = self._create_context()
        self._load(snapshot)
        self._current = None
        self._data.qpos[:] = snapshot.view.qpos
        self._model.site_rgba[:] = snapshot.view.site_rgba
        for update in (self._mujoco.mj_kinematics, self._mujoco.mj_comPos, self._mujoco.mj_camlight):
            update(self._model, self._data)
        self._context.gl_ctx.make_current()  # Every scene has a context of its own.
        self._culling.hide(self._sim.model.camera_name2id(camera), width / height)
        try:
            pixels = self._sim.render(width=width, height=height, camera_name=camera)
        finally:
            self._culling.show_all()
        return np.ascontiguousarray(pixels[::-1, ::-1])

    def expose(self, snapshot: Snapshot) -> Any:
        """LIBERO's problem environment with poses and contacts of ``snapshot``. What it computes is computed again by
        the next step, so looking changes no trajectory."""
        self._load(snapshot)
        self._mujoco.mj_fwdPosition(self._model, self._data)
        return self._env

    def close(self) -> None:
        """Free the scene's pictures, and leave the rest to :func:`give_memory_back`. Snapshots stay valid for another
        scene of the same task."""
        atexit.unregister(self.close)
        if self._context is not None:
            # It frees what its numbers mean in the *current* OpenGL context, which could be another scene's.
            self._context.gl_ctx.make_current()
            self._sim._render_context_offscreen = None
            self._context = self._culling = None
        # LIBERO's own close() would collect garbage, a second for each scene of a worker that has many and ends.
        del self._control_env, self._env, self._sim, self._robot, self._controller, self._dense
        del self._model, self._data

    def _place(self) -> None:
        """A reset that leaves nothing to chance or to the past."""
        from robosuite.utils.errors import RandomizationError

        for observable in self._env._observables.values():
            observable.set_enabled(False)
        # A fresh LIBERO environment's first reset loads the model a second time, which lists these samplers of open and
        # closed doors once more; they draw before the fixtures are placed.
        self._env.object_property_initializers *= 2
        self._env.seed(_PLACEMENT_SEED)
        while True:
            try:
                self._env.reset()
                break
            except RandomizationError:  # No room for an object; LIBERO draws again, too.
                continue
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # A soft reset forgets this one.

    def _look(self, qpos: NDArray[np.float64] | None = None) -> View:
        """The present view. ``qpos``: the positions that the kinematics belong to, if not the present ones."""
        data = self._data
        return View(
            qpos=data.qpos.copy() if qpos is None else qpos,
            eef_pos=data.site_xpos[self._robot.eef_site_id].copy(),
            eef_quat=data.xquat[self._eef_body].copy(),
            gripper_qpos=data.qpos[self._gripper_qpos],
            site_rgba=self._model.site_rgba.copy(),
        )

    def _save(self, view: View) -> Snapshot:
        mujoco = self._mujoco
        physics = np.empty(self._physics_size)
        mujoco.mj_getState(self._model, self._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        controller = self._controller
        self._current = Snapshot(
            physics=physics,
            goal=controller.goal,
            fingers=controller.fingers.copy(),
            site_rgba=self._model.site_rgba.copy(),
            view=view,
        )
        return self._current

    def _load(self, snapshot: Snapshot) -> None:
        if snapshot is self._current:
            return
        mujoco = self._mujoco
        mujoco.mj_setState(self._model, self._data, snapshot.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._model.site_rgba[:] = snapshot.site_rgba
        self._controller.goal = snapshot.goal
        self._controller.fingers[:] = snapshot.fingers
        self._current = snapshot

    def _create_context(self) -> Any:
        if self._spec.draft:
            self._model.vis.quality.offsamples = 0
            self._model.mat_reflectance[:] = 0.0  # a mirror, such as a stove's plate, has the whole scene drawn again
            coarsen_meshes(self._model)
        with drawn_textures(self._model):
            context = render_context(NAME, self._sim, self._spec.max_height, self._spec.max_width)
        # At exit this must run before the EGL display is closed: what is registered last is called first.
        atexit.register(self.close)
        self._culling = Culling(self._model, self._data, context.vopt.geomgroup)
        _discard(self._model.tex_data)  # 140 to 190 MB; OpenGL has its own copy, and nothing else reads them.
        return context


def _discard(pixels: NDArray[np.uint8]) -> None:
    """Give an array's memory pages back to the system; its contents become zeros. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    start = -(-pixels.ctypes.data // page) * page
    length = (pixels.ctypes.data + pixels.nbytes - start) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def give_memory_back() -> None:
    """Free closed scenes, and what building one leaves in MuJoCo's cache and in the allocator: hundreds of megabytes of
    decoded assets."""
    import mujoco

    gc.collect()
    if hasattr(mujoco, "mj_getCache"):  # MuJoCo 3.3 and later.
        mujoco.mj_clearCache(mujoco.mj_getCache())  # type: ignore[attr-defined]  # its stubs leave them out
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
