"""Gymnasium: any env that it knows by an id, as it is. See docs/gymnasium.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from embodied_rl.envs.base import SimObs, SimStep, Task, check_actions, check_reset_state
from embodied_rl.envs.rendering import prefer_egl
from embodied_rl.envs.spaces import CAMERA, SUCCESS_KEYS, Pictures, action_map, at, check_observed, parts_of, words_of
from embodied_rl.errors import UserError, suggestion
from embodied_rl.params import OF_THE_REWARD
from embodied_rl.registry import import_own
from embodied_rl.seeding import derived_seed

_DEFAULT_HZ = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumParams:
    """Parameters of :class:`GymnasiumEnv`."""

    id: str = "CartPole-v1"
    """A registered id (Pendulum-v1), module:id or path/to/file.py:id, where importing the module registers it."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata=OF_THE_REWARD)
    """Further arguments of gymnasium.make."""
    wrappers: tuple[str | dict[str, dict[str, Any]], ...] = field(default=(), metadata=OF_THE_REWARD)
    """Wrappers around the env, the outermost last: names in gymnasium.wrappers or module:Class, alone or with arguments
    ({ClipReward: {min_reward: -1}})."""
    instruction: str | None = None
    """The instruction for language policies; null: made from the id ("cart pole")."""
    state: tuple[str, ...] | None = None
    """The keys that make the state, in this order (a/b is b in a); null: all that are no images; []: no state."""
    images: dict[str, str] | None = None
    """Dict observations: camera -> key of its image; null: every image, its key being the camera's name."""
    pixels: bool = False
    """One more camera, agentview: what the env renders for people, at ``camera_height`` x ``camera_width``."""
    camera_height: PositiveInt = 128
    """Height in pixels of rendered observations (``pixels``)."""
    camera_width: PositiveInt = 128
    """Width in pixels of rendered observations (``pixels``)."""
    success_key: str | None = field(default=None, metadata=OF_THE_REWARD)
    """Where step's info says that the goal holds; null: success or is_success, if either is there."""
    success_return: float | None = field(default=None, metadata=OF_THE_REWARD)
    """An episode that ends with at least this return is a success, too; null: the return says nothing."""
    num_reset_states: PositiveInt = 1_000_000
    """Number of initial states, each a seed of reset. An evaluation takes the first ones."""


class GymnasiumEnv:
    """A Gymnasium env behind the :class:`~embodied_rl.envs.base.SimEnv` protocol: one for each slot.

    Box actions are mapped from [-1, 1] to the space's bounds, values outside are clipped; dimensions without bounds
    take the policy's numbers as they are. Discrete, MultiDiscrete and MultiBinary actions are choices. The reward is
    the env's own, of each step (so ``use_rel_reward`` must be false); its terminations and truncations end episodes.

    An initial state is reset's seed, derived from (``seed``, reset state id), so an episode is a function of it and of
    its actions wherever the env draws from its own ``np_random`` alone.

    Raises:
        UserError: no such env or wrapper, arguments that it does not take, packages that it needs, or spaces that have
            no meaning here.
    """

    Params: ClassVar[type] = GymnasiumParams
    packages = ("gymnasium", "mujoco")
    batched = True  # envs are cheap beside what is done once for all slots of a step

    def __init__(self, num_slots: int, params: GymnasiumParams, seed: int) -> None:
        self._params, self._seed = params, seed
        self.num_reset_states, self.success_return = params.num_reset_states, params.success_return
        self._envs = [_make(params) for _ in range(num_slots)]
        first = self._envs[0]
        self.control_hz = float(first.metadata.get("render_fps") or _DEFAULT_HZ)
        self._task = Task(task_id=0, instruction=params.instruction or words_of(params.id), suite="gymnasium")
        self.action_dim, self.action_choices, self._to_actions = action_map(first.action_space)
        self._observation = _Observation(first.observation_space, params)
        self.state_dim = self._observation.state_dim
        shapes = dict(self._observation.image_shapes)
        if params.pixels:
            if CAMERA in shapes:
                raise UserError(
                    f"env.init_params.pixels: {params.id} has an image {CAMERA!r} of its own; name it in images"
                )
            shapes[CAMERA] = (params.camera_height, params.camera_width)
        self.image_shapes: Mapping[str, tuple[int, int]] = shapes
        check_observed(params.id, self.state_dim, shapes)
        self.tells_success = params.success_return is not None or params.success_key is not None
        self._last: list[Any] = [None] * num_slots
        """Each slot's last observation."""

    @staticmethod
    def check(params: GymnasiumParams) -> None:
        """Raise UserError for an env or a wrapper that does not exist."""
        _spec(params.id)
        for wrapper in params.wrappers:
            _wrapper(wrapper)

    def task(self, reset_state_id: int) -> Task:
        check_reset_state(self, reset_state_id)
        return self._task

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        for slot, reset_state_id in zip(slots, reset_state_ids, strict=True):
            self.task(reset_state_id)
            seed = derived_seed(self._seed, reset_state_id, bits=31)
            self._last[slot], _ = _unpacked("reset", self._envs[slot].reset(seed=seed), "obs, info")

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        check_actions(self, slots, actions)
        rewards = np.empty(len(slots), dtype=np.float32)
        success, terminated, truncated = (np.zeros(len(slots), dtype=np.bool_) for _ in range(3))
        taken = self._to_actions(actions)
        for row, (slot, action) in enumerate(zip(slots, taken if taken.ndim > 1 else taken.tolist(), strict=True)):
            step = self._envs[slot].step(action)
            if len(step) != 5:
                _unpacked("step", step, "obs, reward, terminated, truncated, info")
            self._last[slot], rewards[row], terminated[row], truncated[row], info = step
            success[row] = self._holds(info)
        return SimStep(rewards=rewards, success=success, terminated=terminated, truncated=truncated)

    def observe(self, slots: Sequence[int]) -> SimObs:
        parts = [self._observation.of(self._last[slot]) for slot in slots]
        images = {camera: np.stack([part[1][camera] for part in parts]) for camera in self._observation.image_shapes}
        if self._params.pixels:
            images[CAMERA] = np.stack([self._picture(slot) for slot in slots])
        return SimObs(images=images, state=np.stack([part[0] for part in parts]))

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n,H,W,3]: what the env renders for people.

        Raises:
            UserError: it renders nothing, or lacks a package that it needs for that.
        """
        return np.stack([self._frame(slot) for slot in slots])

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []

    def _holds(self, info: Mapping[str, Any]) -> bool:
        key = self._params.success_key
        if key is not None:
            if key not in info:
                raise UserError(
                    f"env.init_params.success_key: {self._params.id} has no {key!r} in the info of a step."
                    f"{suggestion(key, [str(name) for name in info])}"
                )
            return bool(info[key])
        told = [bool(info[name]) for name in SUCCESS_KEYS if name in info]
        self.tells_success = self.tells_success or bool(told)
        return any(told)

    def _frame(self, slot: int) -> NDArray[np.uint8]:
        import gymnasium

        env = self._envs[slot]
        try:
            viewer = getattr(getattr(env.unwrapped, "mujoco_renderer", None), "viewer", None)
            if viewer is not None:  # It draws into whichever context is current: another env's, or none.
                viewer.make_context_current()
            frame = env.render() if env.render_mode == "rgb_array" else None
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(f"{self._params.id} cannot render: {error}. Videos: {_NO_VIDEOS}") from error
        if frame is None:
            raise UserError(
                f"{self._params.id} renders no rgb_array (render_mode={env.render_mode!r}). Videos: {_NO_VIDEOS}"
            )
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise UserError(
                f"{self._params.id}: render() gives {frame.dtype} {list(frame.shape)}, expected uint8 [H, W, 3] of "
                f"0 to 255. Videos: {_NO_VIDEOS}"
            )
        return np.ascontiguousarray(frame)

    def _picture(self, slot: int) -> NDArray[np.uint8]:
        from PIL import Image

        size = (self._params.camera_width, self._params.camera_height)
        return np.asarray(Image.fromarray(self._frame(slot)).resize(size, Image.Resampling.BILINEAR))


_NO_VIDEOS = "env.eval.video_cfg.save_video=false leaves them out"


def _unpacked(method: str, given: Any, expected: str) -> Any:
    """``given``, unless it has not as many values; raises UserError then: envs for gym were another API."""
    if not isinstance(given, tuple) or len(given) != expected.count(",") + 1:
        got = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise UserError(f"{method}() gives {got}, expected ({expected}), as Gymnasium has it")
    return given


class _Observation:
    """The way from an observation to a state vector and images."""

    def __init__(self, space: Any, params: GymnasiumParams) -> None:
        found, pictures = parts_of(params.id, space, params.state)
        named = [("images", key) for key in (params.images or {}).values()] + [
            ("state", key) for key in params.state or ()
        ]
        for option, key in named:
            if key not in found:
                raise UserError(
                    f"env.init_params.{option}: {params.id} observes no {key!r}, only "
                    f"{', '.join(repr(name) for name in found)}.{suggestion(key, list(found))}"
                )
        cameras = {key or CAMERA: key for key in pictures} if params.images is None else params.images
        for camera, key in cameras.items():
            if key not in pictures:
                raise UserError(
                    f"env.init_params.images.{camera}: expected an image, {Pictures.KNOWN}, but "
                    f"{params.id} observes {found[key]} as {key!r}; a wrapper can change it"
                )
        keys = [key for key in found if key not in pictures] if params.state is None else params.state
        self._images = [(camera, key, pictures[key]) for camera, key in cameras.items()]
        self._state = [(key, _flattener(found[key])) for key in keys]
        self.state_dim = sum(_flat_dim(params.id, key, found[key]) for key in keys)
        self.image_shapes = {camera: shown.size for camera, _, shown in self._images}

    def of(self, observation: Any) -> tuple[NDArray[np.float32], dict[str, NDArray[np.uint8]]]:
        """[S] and camera -> [H,W,3]."""
        parts = [np.asarray(flat(at(observation, key)), dtype=np.float32) for key, flat in self._state]
        images = {camera: shown.rgb(at(observation, key)) for camera, key, shown in self._images}
        return np.concatenate(parts) if parts else np.zeros(0, np.float32), images


def _flattener(space: Any) -> Callable[[Any], Any]:
    """The way from an element of a space to its numbers, [n]."""
    from gymnasium.spaces import Box
    from gymnasium.spaces.utils import flatten

    # The same for a Box, without a look-up in every step.
    return np.ravel if isinstance(space, Box) else partial(flatten, space)


def _flat_dim(env_id: str, key: str, space: Any) -> int:
    from gymnasium.spaces.utils import flatdim

    try:
        return flatdim(space)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"{env_id} observes {space}{f' as {key!r}' if key else ''}, which has no fixed number of values; leave it "
            "out by env.init_params.state=[...], or use a wrapper"
        ) from error


def _spec(env_id: str) -> Any:
    """Gymnasium's spec of a registered env.

    Raises:
        UserError: the module cannot be imported, or no such env is registered.
    """
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        try:
            own = import_own(module)
        except UserError as error:
            raise UserError(f"env.init_params.id: got {env_id!r}, but {error}") from error
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        known = list(gymnasium.registry)
        where = f" after importing {module!r}" if module else "; an env of your own, or of a package, is module:id"
        if module and isinstance(getattr(own, name, None), type):
            where += f"; the class is there: gymnasium.register('{name}-v0', entry_point={name})"
        raise UserError(
            f"env.init_params.id: got {env_id!r}, but Gymnasium knows no env {name!r}{where}.{suggestion(name, known)}"
        ) from error


def _wrapper(entry: str | Mapping[str, Mapping[str, Any]]) -> tuple[Any, Mapping[str, Any]]:
    """(wrapper class, arguments).

    Raises:
        UserError: no such wrapper, or more than one in an entry.
    """
    from gymnasium import wrappers

    if not isinstance(entry, str) and len(entry) != 1:
        raise UserError(
            f"env.init_params.wrappers: got {dict(entry)}, expected one wrapper in each entry: [A, {{B: {{}}}}]"
        )
    ((name, arguments),) = [(entry, {})] if isinstance(entry, str) else entry.items()
    module, _, attribute = name.rpartition(":")
    got = f"env.init_params.wrappers: got {name!r}"
    try:
        owner = import_own(module) if module else wrappers
    except UserError as error:
        raise UserError(f"{got}, but {error}") from error
    if (found := getattr(owner, attribute, None)) is None:
        known = [key for key, value in vars(owner).items() if isinstance(value, type)] if module else wrappers.__all__
        raise UserError(
            f"{got}, expected a name in gymnasium.wrappers or module:Class; {module or 'gymnasium.wrappers'} has no "
            f"{attribute!r}.{suggestion(attribute, known)}"
        )
    return found, arguments


def _make(params: GymnasiumParams) -> Any:
    """A Gymnasium env with its wrappers, that can render if it ever can."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    prefer_egl()
    if params.kwargs.get("render_mode") != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame complains of the screen that is not there
    spec = _spec(params.id)
    kwargs = dict(params.kwargs)
    try:
        creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        if "rgb_array" in getattr(creator, "metadata", {}).get("render_modes", ()):
            kwargs.setdefault("render_mode", "rgb_array")
        env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except TypeError as error:
        raise UserError(f"env.init_params.kwargs: {params.id} cannot be made with {params.kwargs}: {error}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"{params.id} cannot be made: {error}") from error
    for entry in params.wrappers:
        wrapper, arguments = _wrapper(entry)
        try:
            env = wrapper(env, **arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"env.init_params.wrappers: {wrapper.__name__} cannot be put around {params.id} with "
                f"{dict(arguments)}: {error}"
            ) from error
    return env
