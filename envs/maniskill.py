"""ManiSkill 3: manipulation tasks in SAPIEN, on the CPU or batched on a GPU.

Tao et al., "ManiSkill3: GPU Parallelized Robotics Simulation and Rendering for Generalizable Embodied AI",
arXiv:2410.00425. See docs/maniskill.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from embodied_rl.envs import maniskill_twins as twins
from embodied_rl.envs import render_device
from embodied_rl.envs.base import SeededParams, SimObs, SimStep, Task, check_actions, check_reset_state
from embodied_rl.envs.rendering import missing_package, quiet
from embodied_rl.errors import UserError, suggestion
from embodied_rl.params import OF_THE_MACHINE, OF_THE_REWARD
from embodied_rl.seeding import derived_seed

CANNOT_RENDER = (
    "ManiSkill cannot render: no usable Vulkan driver. With a GPU install its Vulkan driver, without one Mesa's "
    "lavapipe, release 24 or newer (Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers; Debian 12: see "
    "docs/maniskill.md). "
    "States alone need none: env.init_params.obs_mode=state env.eval.video_cfg.save_video=false"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManiSkillParams(SeededParams):
    """Parameters of :class:`ManiSkillEnv`."""

    env_id: str
    """ManiSkill's name of the task, such as PushCube-v1."""
    instruction: str | None = None
    """The instruction for language policies; null: the task's own, or one made from the name ("push cube")."""
    obs_mode: Literal["state", "rgb", "rgb+state"] = "state"
    """state: the whole state, objects' poses included. rgb: the task's cameras, and the state without what only a
    simulator knows. rgb+state: the cameras and the whole state."""
    control_mode: str = "pd_ee_delta_pos"
    """One of the robot's controllers; its limits are mapped to [-1, 1]."""
    reward_mode: Literal["normalized_dense", "dense", "sparse"] = field(
        default="normalized_dense", metadata=OF_THE_REWARD
    )
    """ManiSkill's reward, which becomes the reward level; dense ones are counted from the initial state. A digital
    twin's dense one is 0.1 once the object was grasped, 0.1 more once it was held for five steps, and 1 more while the
    task is done (Liu et al. 2025, arXiv:2505.19789)."""
    sim_backend: str = "physx_cpu"
    """physx_cpu: a scene for each slot. physx_cuda: all slots in one batch on the worker's GPU (physx_cuda:1: on that
    one)."""
    render_backend: str | None = field(default=None, metadata=OF_THE_MACHINE)
    """ManiSkill's name of the device that renders; null: the worker's GPU where torch sees one, else the
    CPU."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"physx_(cpu|cuda(:\d+)?)", self.sim_backend):
            raise ValueError(
                f"sim_backend: got {self.sim_backend!r}, expected 'physx_cpu', 'physx_cuda' or 'physx_cuda:1'"
            )


class ManiSkillEnv:
    """A ManiSkill task behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    An initial state is a function of (``seed``, reset state id), and an episode one of that and its actions.

    Raises:
        SimulatorMissingError: ManiSkill is not installed.
        UserError: no such task, assets that have to be downloaded, images where nothing can render.
    """

    Params: ClassVar[type] = ManiSkillParams
    packages = ("mani_skill", "sapien")

    def __init__(self, num_slots: int, params: ManiSkillParams, seed: int) -> None:
        import_maniskill()
        if params.obs_mode != "state" and not can_render():
            raise UserError(CANNOT_RENDER)
        self._params, self._seed = params, seed
        self.batched = params.sim_backend != "physx_cpu"
        self._envs = [self._make(num_slots)] if self.batched else [self._make(1) for _ in range(num_slots)]
        first = self._envs[0]
        self._listed = twins.num_states(first)
        self.num_reset_states = min(params.num_reset_states, self._listed or params.num_reset_states)
        instruction = params.instruction or _own_instruction(first)
        self._task = Task(task_id=0, instruction=instruction or _words(params.env_id), suite="maniskill")
        self.control_hz = float(first.control_freq)
        space = first.single_action_space
        if not hasattr(space, "high"):
            raise UserError(
                f"env.init_params.env_id: got {params.env_id}, which has {len(space)} robots, expected a task with one"
            )
        self._centre, self._half_range = (space.high + space.low) / 2, (space.high - space.low) / 2
        self.action_dim: int = space.shape[0]
        state = _numpy(first.get_obs())
        self.state_dim: int = state.shape[1]
        cameras = [] if params.obs_mode == "state" else list(first.scene.sensors)
        self.image_shapes: Mapping[str, tuple[int, int]] = dict.fromkeys(
            cameras, (params.camera_height, params.camera_width)
        )
        self._state = np.zeros((num_slots, self.state_dim), dtype=np.float32)
        self._first_reward = np.zeros(num_slots, dtype=np.float32)

    @staticmethod
    def image_shapes_of(params: ManiSkillParams) -> Mapping[str, tuple[int, int]] | None:
        """The cameras are the task's own."""
        return {} if params.obs_mode == "state" else None

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        return self._task

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        import torch

        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self.task(reset_state_id)
            seed = derived_seed(self._seed, reset_state_id, bits=31)
            ((env, rows, _),) = self._scenes([slot])
            # One slot at a time, its seed in every row: ManiSkill draws a whole batch from one generator, and a start
            # must depend neither on the row in the batch nor on who else is reset.
            options = {"env_idx": torch.tensor(rows, device=env.device)} if self.batched else {}
            env.reset(seed=[seed] * env.num_envs, options=options | self._start(env, reset_state_id))
        for env, rows, positions in self._scenes(slots):
            index = np.asarray(slots)[positions]
            info = env.get_info()
            self._state[index] = _numpy(env.get_obs(info))[rows]
            if self._params.reward_mode != "sparse":
                idle = torch.zeros((env.num_envs, self.action_dim), device=env.device)
                reward = env.get_reward(obs=env.get_obs(info, unflattened=True), action=idle, info=info)
                self._first_reward[index] = _numpy(reward)[rows]

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        controls = self._centre + self._half_range * np.clip(actions, -1.0, 1.0)
        rewards = np.empty(len(slots), dtype=np.float32)
        success = np.zeros(len(slots), dtype=np.bool_)
        for env, rows, positions in self._scenes(slots):
            index = np.asarray(slots)[positions]
            whole = np.zeros((env.num_envs, self.action_dim), dtype=np.float32)
            whole[rows] = controls[positions]
            obs, reward, _, _, info = env.step(whole)
            rewards[positions] = _numpy(reward)[rows] - self._first_reward[index]
            if "success" in info:
                success[positions] = _numpy(info["success"])[rows]
            self._state[index] = _numpy(obs)[rows]
        return SimStep(rewards=rewards, success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        images = {
            camera: np.empty((len(slots), height, width, 3), dtype=np.uint8)
            for camera, (height, width) in self.image_shapes.items()
        }
        if images:
            for env, rows, positions in self._scenes(slots):
                for camera, pictures in self._pictures(env).items():
                    images[camera][positions] = _numpy(pictures)[rows]
        return SimObs(images=images, state=self._state[list(slots)])

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n, H, W, 3]: the task's own camera for people.

        Raises:
            UserError: nothing here can render.
        """
        if not can_render():
            raise UserError(CANNOT_RENDER)
        frames: list[Any] = [None] * len(slots)
        for env, rows, positions in self._scenes(slots):
            pictures = _numpy(self._frame(env))
            for row, position in zip(rows, positions, strict=True):
                frames[position] = pictures[row]
        return np.stack(frames)

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []

    def _make(self, num_envs: int) -> Any:
        """ManiSkill's env with so many rows."""
        spec = find_task(self._params.env_id)
        return build(self._params, num_envs, spec.cls, **(spec.default_kwargs or {}))

    def _start(self, env: Any, reset_state_id: int) -> dict[str, Any]:
        """Options of the reset to an initial state, beside its seed."""
        import torch

        return {"episode_id": torch.tensor([reset_state_id], device=env.device)} if self._listed else {}

    def _pictures(self, env: Any) -> Mapping[str, Any]:
        """Camera -> [n,H,W,3] of an env's rows."""
        if twins.is_twin(type(env)):
            return twins.pictures(env, self._params.camera_height, self._params.camera_width)
        return {camera: pictures["rgb"] for camera, pictures in env.get_sensor_images().items()}

    def _frame(self, env: Any) -> Any:
        """[n,H,W,3] of an env's rows, for people. A twin shows what its policy sees."""
        if twins.is_twin(type(env)):
            (frame,) = twins.pictures(env, self._params.render_height, self._params.render_width).values()
            return frame
        return env.render_rgb_array()

    def _scenes(self, slots: Sequence[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """(ManiSkill's env, rows of its batch, positions in ``slots``) of each env that has some of ``slots``."""
        if self.batched:
            yield self._envs[0], list(slots), list(range(len(slots)))
        else:
            yield from ((self._envs[slot], [0], [position]) for position, slot in enumerate(slots))


def build(params: ManiSkillParams, num_envs: int, task_class: type, **arguments: Any) -> Any:
    """A ManiSkill env (``BaseEnv``) of a task's class, without gymnasium's wrappers and without a horizon."""
    import torch
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    if params.sim_backend != "physx_cpu" and twins.is_twin(task_class):
        raise UserError(
            f"env.init_params.sim_backend: got {params.sim_backend!r}, but a reset of {params.env_id} lets the whole "
            "batch settle, other slots' episodes, too; use 'physx_cpu'"
        )
    if params.sim_backend != "physx_cpu" and not torch.cuda.is_available():
        raise UserError(
            f"env.init_params.sim_backend: got {params.sim_backend!r}, but torch finds no CUDA device; use 'physx_cpu'"
        )
    sim, device = params.sim_backend, params.render_backend or ("gpu" if torch.cuda.is_available() else "cpu")
    if (own := render_device.chosen()).startswith("cuda:"):
        sim = f"{sim}{own.removeprefix('cuda')}" if sim == "physx_cuda" else sim
        device = params.render_backend or own
    task: Any = task_class
    sensors = {"height": params.camera_height, "width": params.camera_width}
    if twins.is_twin(task):
        task, sensors = twins.with_states(task, can_render()), {}
    with _explain_build(params.env_id):
        env = task(
            **arguments,
            num_envs=num_envs,
            obs_mode="state",
            control_mode=params.control_mode,
            reward_mode=params.reward_mode,
            render_mode="rgb_array" if can_render() else None,
            sim_backend=sim,
            render_backend=device if can_render() else "none",
            sensor_configs=sensors,
            human_render_camera_configs={"height": params.render_height, "width": params.render_width},
        )
    # In ManiSkill's image modes every step renders. Its state mode, told to leave out what that mode leaves out,
    # gives the same state, and images when they are asked for.
    env.obs_mode_struct = parse_obs_mode_to_struct("state" if params.obs_mode == "rgb+state" else params.obs_mode)
    return env


def _own_instruction(env: Any) -> str | None:
    """What the task says of itself, where it does."""
    return env.get_language_instruction()[0] if hasattr(env, "get_language_instruction") else None


def _words(env_id: str) -> str:
    """PushCube-v1 -> push cube."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", re.sub(r"-v\d+$", "", env_id)).lower()


def _numpy(x: Any) -> NDArray[Any]:
    return x.cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)


@functools.cache
def import_maniskill() -> None:
    """Import ManiSkill; where no device can render, with stand-ins for the renderer. Safe to call often.

    Raises:
        SimulatorMissingError: with the command that installs what is missing.
    """
    os.environ.setdefault("MS_RENDERER_LOG_LEVEL", "error")
    try:
        with quiet():
            importlib.import_module("mani_skill.envs")
    except ModuleNotFoundError as error:
        raise missing_package("ManiSkill", error) from error
    logging.getLogger("mani_skill ").setLevel(logging.ERROR)  # The space is ManiSkill's.
    if not can_render():
        _replace_renderer()


@functools.cache
def can_render() -> bool:
    """Whether SAPIEN finds a Vulkan device that it can render on. Asked once a process."""
    import sapien.render

    sapien.render.set_log_level("off")  # Every ManiSkill env sets it again.
    try:
        sapien.render.RenderMaterial()  # Every object of a scene has one, rendered or not.
    except RuntimeError:
        return False
    return True


def find_task(env_id: str) -> Any:
    """ManiSkill's ``EnvSpec`` of a task whose assets are all here.

    Raises:
        UserError: no such task, or one that needs a download: ManiSkill itself would ask for it on standard input.
    """
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    if env_id not in REGISTERED_ENVS:
        raise UserError(
            f"env.init_params.env_id: ManiSkill has no task {env_id!r}." + suggestion(env_id, REGISTERED_ENVS)
        )
    spec = REGISTERED_ENVS[env_id]
    missing = []
    for asset in spec.asset_download_ids or []:
        parts = (
            assets.expand_data_group_into_individual_data_source_ids(asset) if asset in assets.DATA_GROUPS else [asset]
        )
        missing += [part for part in parts if not assets.is_data_source_downloaded(part)]
    if missing:
        raise _assets_missing(env_id, missing)
    return spec


@contextlib.contextmanager
def _explain_build(env_id: str) -> Iterator[None]:
    """While a task is built: no questions on standard input, no chatter, and one message for what cannot be built."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        robot = message.split(" has assets")[0].removeprefix("Robot ")
        raise _assets_missing(robot, [robot])

    ask = download_asset.prompt_yes_no
    download_asset.prompt_yes_no = refuse
    try:
        with quiet():
            yield
    except (UserError, MemoryError):
        raise
    except AssertionError as error:
        if "not in supported modes" not in str(error):
            raise
        wrong, _, modes = str(error).partition(" not in supported modes: ")
        raise UserError(f"env.init_params.control_mode: {env_id} has no {wrong!r}, only {modes}") from error
    except NotImplementedError as error:
        raise UserError(f"{env_id}: ManiSkill says: {error}") from error
    except Exception as error:
        if isinstance(error, (FileNotFoundError, ImportError)) or "download_asset" in str(error):
            raise UserError(f"ManiSkill's {env_id} needs something that is not here: {error}. {_DOWNLOADS}") from error
        if can_render():
            raise
        raise UserError(f"{env_id} needs the renderer even for states ({error}). {CANNOT_RENDER}") from error
    finally:
        download_asset.prompt_yes_no = ask


_DOWNLOADS = "Its downloads: python -m mani_skill.utils.download_asset --list scene"


def _assets_missing(name: str, missing: list[str]) -> UserError:
    return UserError(
        f"ManiSkill's {name} needs assets that are not here "
        f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}); "
        f"get them with: python -m mani_skill.utils.download_asset {name}"
    )


def _replace_renderer() -> None:
    """Let tasks be built without a renderer.

    Tasks make materials and visual shapes while they build their scene, whether or not anything is rendered, and
    SAPIEN's constructors ask for a Vulkan device. Physics takes only the collision shapes, so here materials become
    objects that swallow everything, and no entity gets a visual shape. States are those of an env with a renderer.
    """
    import sapien.render
    from sapien.wrapper.actor_builder import ActorBuilder

    os.environ["MS_RENDERER_LOG_LEVEL"] = "off"
    material = sapien.render.RenderMaterial
    for name, module in list(sys.modules.items()):
        if name.startswith(("sapien", "mani_skill")) and vars(module).get("RenderMaterial") is material:
            vars(module)["RenderMaterial"] = _Swallow
    builder: Any = ActorBuilder
    builder.build_render_component = lambda self: None


class _Swallow:
    """Any attribute is a function that takes everything and gives another one of these."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> _Swallow:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Swallow()

    def __call__(self, *args: object, **kwargs: object) -> _Swallow:
        return _Swallow()
