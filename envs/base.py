"""The simulator protocol, all that a new simulator has to provide, and the names of those that there are.

An adapter owns some env *slots* and knows nothing of chunks, episodes, horizons, groups, masks, reward shaping or
video: ``chunked.py`` does those, once for every simulator. Adapters speak numpy; torch is not needed to import one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from embodied_rl.errors import UserError, suggestion
from embodied_rl.params import OF_THE_MACHINE, OF_THE_REWARD, jsonable
from embodied_rl.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of an episode."""

    task_id: int
    instruction: str
    suite: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimObs:
    """Observations of n slots."""

    images: Mapping[str, NDArray[np.uint8]]
    """Camera name -> [n,H,W,3], upright RGB; empty where the simulator is state-only."""
    state: NDArray[np.float32]
    """[n,S]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """The outcome of one control step of n slots."""

    rewards: NDArray[np.float32]
    """[n], the simulator's own reward *level* of the new state (for LIBERO 1 while the goal holds, else 0). A
    dense level must be 0 in the initial state: relative rewards count from there."""
    success: NDArray[np.bool_]
    """[n], the goal holds now."""
    terminated: NDArray[np.bool_] | None = None
    """[n], the simulator's own episode is over and cannot go on: the task failed, unless the goal holds. None: nothing
    but success ends an episode."""
    truncated: NDArray[np.bool_] | None = None
    """[n], the simulator cuts the episode here though the task goes on. None: it has no horizon of its own."""


class SimEnv(Protocol):
    """A simulator adapter with a fixed number of slots.

    Construct as ``Adapter(num_slots, params, seed)`` where ``params`` is the adapter's own ``Params`` dataclass, built
    from the config's ``env.init_params``.

    Some attributes may be left out. By two of the class ``eval.json`` tells which evaluations had the same episodes:
    ``packages``, the names of the distributions whose versions change what an episode is (none), and
    ``states_need_seed``, whether an initial state depends on ``seed`` beside its number (True). Two static methods find
    misfits before anything starts, as sizes do that are class attributes: ``image_shapes_of(params)``, ``image_shapes``
    before there is a simulator, None where only that knows them; and ``check(params)``, which raises UserError for what
    is wrong already, such as a task that does not exist. A third, ``memory_of(params, envs=..., tasks=...)``, tells
    ``plan`` the bytes of a process with so many initial states at once, of so many tasks (None: all).

    ``release()``, with ``enable_offload`` between rollouts and evaluations, gives back what the next call that needs it
    takes again by itself, such as scenes and rendering contexts; episodes go on where they are, to the same bits. A
    simulator without it is closed and built anew, and open episodes are played again by their actions.

    ``action_choices`` is the number of choices in each action dimension, where actions are choices; ``step`` then gets
    their numbers, from 0. ``success_return``: an episode that ends with at least this return, in rewards before
    ``reward_coef``, is a success, too. ``tells_success``: False while no step has said whether it succeeded.
    ``tasks_at_once``: an adapter that takes long to go from one to the next where slots play more tasks says how many.
    """

    Params: ClassVar[type]
    batched: bool
    """True if stepping many slots in one call is cheaper than one after the other (GPU simulators). When False the
    caller steps one slot through its whole chunk before it turns to the next, so an adapter may share a scene."""
    control_hz: float
    """Control steps a second; videos play at this rate."""
    action_dim: int
    state_dim: int
    num_reset_states: int
    """Initial states are numbered 0 .. num_reset_states - 1, ordered by task."""

    @property
    def image_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Camera name -> (height, width) of its images in :class:`SimObs`; empty where the simulator is state-only."""
        ...

    def task(self, reset_state_id: int) -> Task:
        """The task an initial state belongs to."""
        ...

    def reset(self, slots: Sequence[int], reset_state_ids: Sequence[int]) -> None:
        """Start new episodes, settled and ready for the policy's first action."""
        ...

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        """One control step. ``actions`` is [n,A] in the policy's convention; the adapter converts it."""
        ...

    def observe(self, slots: Sequence[int]) -> SimObs:
        """Observations now; this is where images are rendered."""
        ...

    def render(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        """[n,H,W,3] frames for people (videos)."""
        ...

    def close(self) -> None: ...


PixelCount = Annotated[int, Field(ge=1, le=8192)]
"""Height or width of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededParams:
    """Parameters of simulators that draw their initial states: sizes of images, number of states."""

    camera_height: PixelCount = 128
    """Height in pixels of every camera's images."""
    camera_width: PixelCount = 128
    """Width in pixels of every camera's images."""
    render_height: PixelCount = field(default=256, metadata=OF_THE_MACHINE)
    """Height in pixels of video frames."""
    render_width: PixelCount = field(default=256, metadata=OF_THE_MACHINE)
    """Width in pixels of video frames."""
    num_reset_states: PositiveInt = 1_000_000
    """Number of initial states. An evaluation takes the first ones; training draws from all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSpaces:
    """What goes in and out of an env; None: only the simulator knows."""

    action_dim: int | None
    state_dim: int | None
    image_shapes: Mapping[str, tuple[int, int]] | None
    """Camera -> (height, width)."""
    action_choices: tuple[int, ...] | None = None
    """As in ``SimEnv``."""


def known_spaces(env_type: str | None, params: Any) -> KnownSpaces:
    """As much as the adapter tells without its simulator; of no env (None), what language is: tokens."""
    if env_type is None:
        return KnownSpaces(action_dim=1, state_dim=0, image_shapes={})
    adapter = adapter_class(env_type)
    action_dim, state_dim = (getattr(adapter, name, None) for name in ("action_dim", "state_dim"))
    shapes = getattr(adapter, "image_shapes_of", lambda _: None)(params)
    return KnownSpaces(
        action_dim=action_dim if isinstance(action_dim, int) else None,
        state_dim=state_dim if isinstance(state_dim, int) else None,
        image_shapes=shapes,
        action_choices=getattr(adapter, "action_choices", ()) if isinstance(action_dim, int) else None,
    )


def check_reset_state(sim: SimEnv, reset_state_id: int) -> None:
    """Raise ValueError for an initial state that the simulator does not have."""
    if not 0 <= reset_state_id < sim.num_reset_states:
        raise ValueError(f"reset_state_id: got {reset_state_id}, expected 0 to {sim.num_reset_states - 1}")


def check_actions(sim: SimEnv, slots: Sequence[int], actions: NDArray[np.float32]) -> None:
    """Raise ValueError unless ``actions`` are finite and [len(slots), A]."""
    if np.shape(actions) != (len(slots), sim.action_dim):
        raise ValueError(f"step: got actions {list(np.shape(actions))}, expected [{len(slots)}, {sim.action_dim}]")
    if not np.isfinite(actions).all():
        bad = [slot for slot, action in zip(slots, actions, strict=True) if not np.isfinite(action).all()]
        raise ValueError(f"step: the actions of slots {bad} are NaN or infinite, expected numbers in [-1, 1]")


def check_choices(name: str, values: Collection[str], choices: Collection[str]) -> None:
    """Raise ValueError unless each of ``values``, which the parameter ``name`` has, is one of ``choices``, once."""
    for value in values:
        if value not in choices:
            raise ValueError(
                f"{name}: got {value!r}, expected one of {', '.join(choices)}." + suggestion(value, choices)
            )
    if len(set(values)) != len(values):
        raise ValueError(f"{name}: got {list(values)}, expected each at most once")


ADAPTERS: Final = Registry(
    "env.env_type",
    {
        "dummy": "embodied_rl.envs.dummy:DummyEnv",
        "envpool": "embodied_rl.envs.envpool:EnvPoolEnv",
        "gymnasium": "embodied_rl.envs.gymnasium:GymnasiumEnv",
        "libero": "embodied_rl.envs.libero.adapter:LiberoEnv",
        "maniskill": "embodied_rl.envs.maniskill:ManiSkillEnv",
        "metaworld": "embodied_rl.envs.metaworld:MetaworldEnv",
        "put_on_plate": "embodied_rl.envs.put_on_plate:PutOnPlateEnv",
        "robosuite": "embodied_rl.envs.robosuite:RobosuiteEnv",
    },
    group="embodied_rl.envs",
    needs_params=True,
)
"""``env_type`` -> "module:Class". A new simulator adds one line."""


def adapter_class(env_type: str) -> type[SimEnv]:
    """The adapter that ``env_type`` names, built-in or from outside (:mod:`embodied_rl.registry`).

    Importing an adapter needs neither torch nor its simulator; constructing it needs the simulator.

    Raises:
        UserError: no such name, module or class, or one without ``Params``.
    """
    return ADAPTERS.load(env_type)


def params_of_the_machine(env_type: str) -> Collection[str]:
    """The names in ``init_params`` that change no episode (:data:`~embodied_rl.params.OF_THE_MACHINE`); none of an
    adapter that is not at hand."""
    return _marked(env_type, OF_THE_MACHINE)


def params_of_the_reward(env_type: str) -> Collection[str]:
    """Those that decide what a step earns (:data:`~embodied_rl.params.OF_THE_REWARD`)."""
    return _marked(env_type, OF_THE_REWARD)


def _marked(env_type: str, mark: Mapping[str, bool]) -> Collection[str]:
    try:
        return [f.name for f in fields(adapter_class(env_type).Params) if mark.items() <= f.metadata.items()]
    except UserError:
        return ()


def default_params(env_type: str) -> dict[str, Any]:
    """The names in ``init_params`` and their defaults, as JSON types; none of an adapter that is not at hand."""
    try:
        params = adapter_class(env_type).Params
    except UserError:
        return {}
    return {f.name: jsonable(f.default) for f in fields(params) if f.default is not MISSING} | {
        f.name: jsonable(f.default_factory()) for f in fields(params) if f.default_factory is not MISSING
    }


def params_of_episodes(env_type: str, init_params: Mapping[str, Any]) -> dict[str, Any]:
    """What episodes depend on of ``init_params``, as JSON types, to tell whether two sets of them mean the same: with
    defaults, without what changes no episode."""
    free = params_of_the_machine(env_type)
    return {k: v for k, v in {**default_params(env_type), **jsonable(dict(init_params))}.items() if k not in free}
