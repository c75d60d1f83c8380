"""ManiSkill 3: manipulation tasks in SAPIEN, on the CPU or batched on a GPU.

Tao et al., "ManiSkill3: GPU Parallelized Robotics Simulation and Rendering for Generalizable Embodied AI",
arXiv:2410.00425. See docs/maniskill.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from embodied_rl.envs.base import SimObs, SimStep, Task
from embodied_rl.envs.maniskill.install import CANNOT_RENDER, can_render, explain_build, find_task, import_maniskill
from embodied_rl.errors import UserError
from embodied_rl.seeding import derived_seed

_PositiveInt = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManiSkillParams:
    """Parameters of :class:`ManiSkillEnv`."""

    env_id: str
    """ManiSkill's name of the task, such as PushCube-v1."""
    instruction: str | None = None
    """What language policies are told; null: made from the name ("push cube")."""
    obs_mode: Literal["state", "rgb", "rgb+state"] = "state"
    """state: the whole state, objects' poses included. rgb: the task's cameras, and the state without what only a
    simulator knows. rgb+state: the cameras and the whole state."""
    control_mode: str = "pd_ee_delta_pos"
    """One of the robot's controllers; its limits are mapped to [-1, 1]."""
    reward_mode: Literal["normalized_dense", "dense", "sparse"] = "normalized_dense"
    """ManiSkill's reward, which becomes the reward level; dense ones are counted from the initial state."""
    sim_backend: str = "physx_cpu"
    """physx_cpu: a scene for each slot. physx_cuda (or physx_cuda:1): all slots in one batch on the GPU."""
    render_backend: str | None = None
    """ManiSkill's name of the device that renders; null: the GPU where torch sees one, else the CPU."""
    camera_height: _PositiveInt = 128
    """Height in pixels of every camera's images."""
    camera_width: _PositiveInt = 128
    """Width in pixels of every camera's images."""
    render_height: _PositiveInt = 256
    """Height in pixels of video frames."""
    render_width: _PositiveInt = 256
    """Width in pixels of video frames."""
    num_reset_states: _PositiveInt = 1_000_000
    """How many initial states are numbered. An evaluation takes the first ones; training draws from all."""

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
        self.num_reset_states = params.num_reset_states
        name = re.sub(r"-v\d+$", "", params.env_id)
        self._task = Task(
            task_id=0,
            instruction=params.instruction or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower(),
            suite="maniskill",
        )
        self._envs = [_build(params, num_slots)] if self.batched else [_build(params, 1) for _ in range(num_slots)]
        first = self._envs[0]
        self.control_hz = float(first.control_freq)
        space = first.single_action_space
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

    def task(self, reset_state_id: int) -> Task:
        if not 0 <= reset_state_id < self.num_reset_states:
            raise ValueError(f"reset_state_id: got {reset_state_id}, expected 0 to {self.num_reset_states - 1}")
        return self._task

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        import torch

        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self.task(reset_state_id)
            seed = derived_seed(self._seed, reset_state_id, bits=31)
            ((env, rows, _),) = self._scenes([slot])
            # One slot at a time, its seed in every row: ManiSkill draws a whole batch from one generator, and a start
            # must depend neither on the place in the batch nor on who else is reset.
            options = {"env_idx": torch.tensor(rows, device=env.device)} if self.batched else None
            env.reset(seed=[seed] * env.num_envs, options=options)
        for env, rows, places in self._scenes(slots):
            index = np.asarray(slots)[places]
            info = env.get_info()
            self._state[index] = _numpy(env.get_obs(info))[rows]
            if self._params.reward_mode != "sparse":
                idle = torch.zeros((env.num_envs, self.action_dim), device=env.device)
                reward = env.get_reward(obs=env.get_obs(info, unflattened=True), action=idle, info=info)
                self._first_reward[index] = _numpy(reward)[rows]

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        if np.shape(actions) != (len(slots), self.action_dim):
            raise ValueError(f"step: got actions {list(np.shape(actions))}, expected [{len(slots)}, {self.action_dim}]")
        controls = self._centre + self._half_range * np.clip(actions, -1.0, 1.0)
        rewards = np.empty(len(slots), dtype=np.float32)
        success = np.zeros(len(slots), dtype=np.bool_)
        for env, rows, places in self._scenes(slots):
            index = np.asarray(slots)[places]
            whole = np.zeros((env.num_envs, self.action_dim), dtype=np.float32)
            whole[rows] = controls[places]
            obs, reward, _, _, info = env.step(whole)
            rewards[places] = _numpy(reward)[rows] - self._first_reward[index]
            if "success" in info:
                success[places] = _numpy(info["success"])[rows]
            self._state[index] = _numpy(obs)[rows]
        return SimStep(rewards=rewards, success=success)

    def observe(self, slots: Sequence[int]) -> SimObs:
        images = {
            camera: np.empty((len(slots), height, width, 3), dtype=np.uint8)
            for camera, (height, width) in self.image_shapes.items()
        }
        if images:
            for env, rows, places in self._scenes(slots):
                for camera, pictures in env.get_sensor_images().items():
                    images[camera][places] = _numpy(pictures["rgb"])[rows]
        return SimObs(images=images, state=self._state[list(slots)])

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n, H, W, 3]: the task's own camera for people.

        Raises:
            UserError: nothing here can render.
        """
        if not can_render():
            raise UserError(CANNOT_RENDER)
        frames: list[Any] = [None] * len(slots)
        for env, rows, places in self._scenes(slots):
            pictures = _numpy(env.render_rgb_array())
            for row, place in zip(rows, places, strict=True):
                frames[place] = pictures[row]
        return np.stack(frames)

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []

    def _scenes(self, slots: Sequence[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """(ManiSkill's env, rows of its batch, places in ``slots``) of each env that has some of ``slots``."""
        if self.batched:
            yield self._envs[0], list(slots), list(range(len(slots)))
        else:
            yield from ((self._envs[slot], [0], [place]) for place, slot in enumerate(slots))


def _build(params: ManiSkillParams, num_envs: int) -> Any:
    """A ManiSkill env (``BaseEnv``), without gymnasium's wrappers and without a horizon."""
    import torch
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    if params.sim_backend != "physx_cpu" and not torch.cuda.is_available():
        raise UserError(
            f"env.init_params.sim_backend: got {params.sim_backend!r}, but torch finds no CUDA device; use 'physx_cpu'"
        )
    spec = find_task(params.env_id)
    device = params.render_backend or ("gpu" if torch.cuda.is_available() else "cpu")
    with explain_build(params.env_id):
        env = spec.make(
            num_envs=num_envs,
            obs_mode="state",
            control_mode=params.control_mode,
            reward_mode=params.reward_mode,
            render_mode="rgb_array" if can_render() else None,
            sim_backend=params.sim_backend,
            render_backend=device if can_render() else "none",
            sensor_configs={"height": params.camera_height, "width": params.camera_width},
            human_render_camera_configs={"height": params.render_height, "width": params.render_width},
        )
    # In ManiSkill's image modes every step renders. Its state mode, told to leave out what that mode leaves out,
    # gives the same state, and images when they are asked for.
    env.obs_mode_struct = parse_obs_mode_to_struct("state" if params.obs_mode == "rgb+state" else params.obs_mode)
    return env


def _numpy(x: Any) -> NDArray[Any]:
    return x.cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)
