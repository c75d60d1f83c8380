"""EnvPool: envs in C++, all slots in one call (arXiv:2206.10558). See docs/envpool.md."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from embodied_rl.envs.base import SimObs, SimStep, Task, check_actions, check_reset_state
from embodied_rl.envs.rendering import explain_missing
from embodied_rl.envs.spaces import CAMERA, SUCCESS_KEYS, action_map, at, check_observed, parts_of, words_of
from embodied_rl.errors import UserError, suggestion
from embodied_rl.params import OF_THE_MACHINE, OF_THE_REWARD
from embodied_rl.seeding import derived_seed

_CONTROL_HZ: Final = 30.0
_MUJOCO: Final = ("mujoco", "metaworld", "myosuite", "robotics")
"""Families whose pictures need an OpenGL context that EnvPool does not make: without one it ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPoolParams:
    """Parameters of :class:`EnvPoolEnv`."""

    id: str = "CartPole-v1"
    """One of envpool.list_all_envs(): CartPole-v1, HalfCheetah-v5, Pong-v5, ..."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata=OF_THE_REWARD)
    """Further arguments of envpool.make_gymnasium."""
    num_threads: NonNegativeInt = field(default=1, metadata=OF_THE_MACHINE)
    """Threads that step the envs of a worker; 0: one for each core."""
    instruction: str | None = None
    """The instruction for language policies; null: made from the id ("half cheetah")."""
    state: tuple[str, ...] | None = None
    """Dict observations: the keys that make the state, in this order (a/b is b in a); null: all that are no images."""
    success_key: str | None = field(default=None, metadata=OF_THE_REWARD)
    """Where step's info says that the goal holds; null: success or is_success, if either is there."""
    success_return: float | None = field(default=None, metadata=OF_THE_REWARD)
    """An episode that ends with at least this return is a success, too; null: the return says nothing."""
    num_reset_states: PositiveInt = 1_000_000
    """Number of initial states, each a seed. An evaluation takes the first ones."""


@dataclass(slots=True, eq=False)
class _Pool:
    """Envs that were reset together. EnvPool takes seeds when it makes envs, so a reset makes new ones."""

    envs: Any
    rows: dict[int, int]
    """Slot -> number of its env, from 0."""


class EnvPoolEnv:
    """An env of EnvPool behind the :class:`~embodied_rl.envs.base.SimEnv` protocol.

    Actions as :class:`~embodied_rl.envs.gymnasium.GymnasiumEnv` takes them. The reward is the env's own, of each step
    (so ``use_rel_reward`` must be false); its terminations and truncations end episodes. A uint8 observation [C,H,W] is
    a picture: one channel is grey, three are red, green and blue, and of four, Atari's last frames, the newest three
    are the picture's channels.

    An initial state is a seed, derived from (``seed``, reset state id). Envs are made anew for it, in 0.02 ms
    (CartPole) to 1.5 ms (HalfCheetah) each, Atari's in 80.

    Raises:
        UserError: EnvPool is not installed, no such env, arguments that it does not take, or spaces that have no
            meaning here.
    """

    Params: ClassVar[type] = EnvPoolParams
    packages = ("envpool",)
    batched = True
    control_hz = _CONTROL_HZ

    def __init__(self, num_slots: int, params: EnvPoolParams, seed: int) -> None:
        self.check(params)
        self._params, self._seed = params, seed
        self.num_reset_states, self.success_return = params.num_reset_states, params.success_return
        self._task = Task(task_id=0, instruction=params.instruction or words_of(params.id), suite="envpool")
        example, first = _reset(params, [0])
        family = type(example).__mro__[1].__module__
        self._shows = not any(name in family for name in _MUJOCO)
        self.action_dim, self.action_choices, self._to_actions = action_map(example.action_space)
        found, images = parts_of(params.id, example.observation_space, params.state)
        self._images = {key or CAMERA: (key, shown) for key, shown in images.items()}
        self.image_shapes: Mapping[str, tuple[int, int]] = {
            camera: shown.size for camera, (_, shown) in self._images.items()
        }
        keys = [key for key in found if key not in images] if params.state is None else list(params.state)
        for key in keys:
            if key not in found or key in images:
                raise UserError(
                    f"env.init_params.state: {params.id} observes no numbers {key!r}, only "
                    f"{', '.join(repr(name) for name in found if name not in images)}.{suggestion(key, list(found))}"
                )
        self._state = [(key, _to_vectors(params.id, found[key])) for key in keys]
        check_observed(params.id, len(keys), self.image_shapes)
        seen = self._seen(first)
        self.state_dim = seen.state.shape[1]
        self._last = SimObs(
            images={camera: np.repeat(image, num_slots, 0) for camera, image in seen.images.items()},
            state=np.repeat(seen.state, num_slots, 0),
        )
        self._pools: list[_Pool] = []

    @staticmethod
    def check(params: EnvPoolParams) -> None:
        """Raise UserError for an env that does not exist; where EnvPool is not installed, that is said at the start."""
        if find_spec("envpool") is None:
            return
        known = _envpool().list_all_envs()
        if params.id not in known:
            raise UserError(
                f"env.init_params.id: got {params.id!r}, but EnvPool knows no such env."
                f"{suggestion(params.id, known)} An env of Gymnasium, or your own, is env=gymnasium"
            )

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        return self._task

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for reset_state_id in reset_state_ids:
            self.task(reset_state_id)
        for pool in self._pools:
            for slot in slots:
                pool.rows.pop(slot, None)
        self._pools = [pool for pool in self._pools if pool.rows]
        seeds = [derived_seed(self._seed, state, bits=31) for state in reset_state_ids]
        envs, observation = _reset(self._params, seeds)
        self._pools.append(_Pool(envs, {slot: row for row, slot in enumerate(slots)}))
        self._keep(slots, observation)

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        taken = self._to_actions(actions)
        rewards = np.empty(len(slots), dtype=np.float32)
        success, terminated, truncated = (np.zeros(len(slots), dtype=np.bool_) for _ in range(3))
        for pool in self._pools:
            at_row = {pool.rows[slot]: position for position, slot in enumerate(slots) if slot in pool.rows}
            if not at_row:
                continue
            rows = np.fromiter(at_row, np.int32, len(at_row))
            seen, reward, ended, cut, info = pool.envs.step(taken[list(at_row.values())], rows)
            positions = [at_row[row] for row in info["env_id"].tolist()]  # EnvPool's order, not the one given
            rewards[positions], terminated[positions], truncated[positions] = reward, ended, cut
            success[positions] = self._holds(info)
            self._keep([slots[position] for position in positions], seen)
        return SimStep(rewards=rewards, success=success, terminated=terminated, truncated=truncated)

    def observe(self, slots: Sequence[int]) -> SimObs:
        chosen = list(slots)
        return SimObs(
            images={camera: images[chosen] for camera, images in self._last.images.items()},
            state=self._last.state[chosen],
        )

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n,H,W,3]: what the env renders for people.

        Raises:
            UserError: it renders nothing, or by MuJoCo.
        """
        if not self._shows:
            raise UserError(f"EnvPool cannot draw {self._params.id} here. Videos: {_NO_VIDEOS}")
        frames = []
        for slot in slots:
            pool = next(pool for pool in self._pools if slot in pool.rows)
            try:
                frames.append(pool.envs.render(env_ids=[pool.rows[slot]])[0])
            except RuntimeError as error:
                raise UserError(
                    f"EnvPool's {self._params.id} renders nothing: {error}. Videos: {_NO_VIDEOS}"
                ) from error
        return np.stack(frames)

    def close(self) -> None:
        self._pools = []

    def _keep(self, slots: Sequence[int], observation: Any) -> None:
        seen, chosen = self._seen(observation), list(slots)
        self._last.state[chosen] = seen.state
        for camera, images in seen.images.items():
            self._last.images[camera][chosen] = images

    def _seen(self, observation: Any) -> SimObs:
        parts = [vectors(at(observation, key)) for key, vectors in self._state]
        images = {camera: shown.rgb(at(observation, key)) for camera, (key, shown) in self._images.items()}
        count = len(parts[0] if parts else next(iter(images.values())))
        return SimObs(images=images, state=np.concatenate(parts, 1) if parts else np.zeros((count, 0), np.float32))

    def _holds(self, info: Mapping[str, Any]) -> NDArray[np.bool_]:
        key = self._params.success_key
        if key is not None and key not in info:
            raise UserError(
                f"env.init_params.success_key: {self._params.id} has no {key!r} in the info of a step."
                f"{suggestion(key, [str(name) for name in info])}"
            )
        holds = np.zeros(len(info["env_id"]), np.bool_)
        for name in SUCCESS_KEYS if key is None else (key,):
            if name in info:
                holds |= np.asarray(info[name]).astype(np.bool_)
        return holds


_NO_VIDEOS: Final = "env.eval.video_cfg.save_video=false leaves them out, eval_env=gymnasium may have them"


def _envpool() -> Any:
    with explain_missing("EnvPool"):
        return importlib.import_module("envpool")


def _reset(params: EnvPoolParams, seeds: list[int]) -> tuple[Any, Any]:
    """New envs, and their first observations."""
    given = {"num_threads": params.num_threads, "render_mode": "rgb_array", **params.kwargs}
    envpool = _envpool()
    try:
        with warnings.catch_warnings():  # that bounds in float64 become float32
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            envs = envpool.make_gymnasium(params.id, num_envs=len(seeds), seed=seeds, **given)
            return envs, envs.reset()[0]
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"env.init_params.kwargs: {params.id} cannot be made with {params.kwargs}: {error}") from error


def _to_vectors(env_id: str, space: Any) -> Any:
    """The way from n observations to [n,S] float32: numbers as they are, a choice as ones and zeros.

    Raises:
        UserError: neither a Box nor Discrete.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return lambda values: np.asarray(values, np.float32).reshape(len(values), -1)
    if isinstance(space, spaces.Discrete):
        return lambda values: np.eye(space.n, dtype=np.float32)[np.asarray(values).astype(np.int64) - space.start]
    raise UserError(
        f"{env_id} observes {space}, expected Box or Discrete; choose others by env.init_params.state=[...]"
    )
