"""Gymnasium's spaces in this project's terms, for adapters whose envs have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.errors import UserError, listed

CAMERA: Final = "agentview"
"""The camera of an env whose whole observation is one image, and of rendered pixels."""
SUCCESS_KEYS: Final = ("success", "is_success")
"""Where a step's info says that the goal holds, unless the config names another key."""


def leaves(space: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The spaces in nested Dict spaces, by a/b; a space that is no Dict is its own, by ""."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict):
        yield prefix, space
        return
    for name, below in space.items():
        yield from leaves(below, f"{prefix}/{name}" if prefix else str(name))


def at(observation: Any, key: str) -> Any:
    """The part of an observation that ``key`` of :func:`leaves` names; names may have slashes of their own."""
    while key:
        names = [name for name in observation if f"{key}/".startswith(f"{name}/")]
        if not names:
            raise KeyError(f"{key}: got an observation with {listed(map(str, observation))}")
        name = max(names, key=len)
        observation, key = observation[name], key[len(name) + 1 :]
    return observation


@dataclass(frozen=True)
class Pictures:
    """A space of pictures: uint8 [H,W,3], [H,W,1], [H,W], or [C,H,W] of 1, 3 or 4 channels or frames, of which the last
    three become red, green and blue."""

    KNOWN: ClassVar[str] = "uint8 [H,W,3], [H,W,1], [H,W] or [C,H,W] of 1, 3 or 4 channels or frames"

    size: tuple[int, int]
    """Height, width."""
    _channels: int
    """The axis of channels, from the end; 0: there is none."""

    @classmethod
    def of(cls, space: Any) -> Pictures | None:
        shape: tuple[int, ...] = (space.dtype == np.uint8 and space.shape) or ()
        match shape:
            case (height, width) | (height, width, 1 | 3):
                return cls((height, width), -1 if len(shape) == 3 else 0)
            case (1 | 3 | 4, height, width):
                return cls((height, width), -3)
        return None

    def rgb(self, pictures: Any) -> NDArray[np.uint8]:
        """[...,H,W,3] of elements [...,*shape]."""
        pictures = np.asarray(pictures)
        if self._channels == -3:
            pictures = np.moveaxis(pictures[..., -3:, :, :], -3, -1)
        elif not self._channels:
            pictures = pictures[..., None]
        return np.broadcast_to(pictures, (*pictures.shape[:-1], 3))


_TAKES: Final = """'env.init_params.state=["{}"]'"""
"""Quoted for a shell and for Hydra: the key of an observation that is no dict is empty."""


def parts_of(env_id: str, space: Any, state: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Pictures]]:
    """(leaves by key, those of them that are pictures) of an observation space.

    Raises:
        UserError: ``state`` does not say what makes the state, and pictures of a shape that is not known would.
    """
    found = dict(leaves(space))
    pictures = {key: shown for key, leaf in found.items() if (shown := Pictures.of(leaf)) is not None}
    for key, leaf in found.items():
        if state is None and key not in pictures and leaf.dtype == np.uint8 and len(leaf.shape) > 2:
            raise UserError(
                f"{env_id} observes {leaf}{f' as {key!r}' if key else ''}, which is no picture ({Pictures.KNOWN}). A "
                f"wrapper can change it; {_TAKES.format(key)} takes it as numbers"
            )
    return found, pictures


def check_observed(env_id: str, state_dim: int, cameras: Collection[str]) -> None:
    """Raise UserError where a policy would observe nothing."""
    if not state_dim and not cameras:
        raise UserError(
            f"env.init_params: a policy would observe nothing of {env_id}, no numbers (state) and no pictures "
            "(images); name what it is to see, or leave these keys out"
        )


def action_map(space: Any) -> tuple[int, tuple[int, ...], Callable[[NDArray[np.float32]], NDArray[Any]]]:
    """(action dimensions A, choices of each, the way from the policy's [n,A] to n actions); no choices: continuous.

    Numbers in [-1, 1] become the bounds of a Box, those outside are clipped; dimensions without two bounds take a
    number as it is, as far as a single bound lets them. A Discrete space's actions are [n], all others [n,...].

    Raises:
        UserError: a space that has no meaning here.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        centre = np.where(bounded, (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2, 0.0)
        half = np.where(bounded, (np.where(bounded, high, 0) - np.where(bounded, low, 0)) / 2, 1.0)

        least, most = np.where(bounded, -1.0, low), np.where(bounded, 1.0, high)

        def scaled(actions: NDArray[np.float32]) -> NDArray[Any]:
            return (centre + half * np.clip(actions, least, most)).astype(space.dtype).reshape(-1, *space.shape)

        return len(low), (), scaled
    if isinstance(space, spaces.Discrete):
        choices, start, shape, dtype = np.array([space.n]), np.array([space.start]), (), np.int64
    elif isinstance(space, spaces.MultiDiscrete):
        choices, start, shape, dtype = space.nvec.ravel(), space.start.ravel(), space.shape, space.dtype
    elif isinstance(space, spaces.MultiBinary):
        choices = np.full(int(np.prod(space.shape)), 2)
        start, shape, dtype = np.zeros_like(choices), space.shape, space.dtype
    else:
        raise UserError(
            f"got an env with actions {space}, expected Box of floats, Discrete, MultiDiscrete or MultiBinary; a "
            "wrapper (env.init_params.wrappers) can change them"
        )

    def chosen(actions: NDArray[np.float32]) -> NDArray[Any]:
        index = actions.astype(np.int64)
        if (index != actions).any() or (index < 0).any() or (index >= choices).any():
            raise ValueError(
                f"step: got the choices {actions.tolist()}, expected whole numbers below {choices.tolist()}"
            )
        return (index + start).astype(dtype).reshape(-1, *shape)

    return len(choices), tuple(int(n) for n in choices), chosen


def words_of(env_id: str) -> str:
    """The id in words: "cart pole" for CartPole-v1."""
    name = re.sub(r"-v\d+$", "", re.split(r"[:/]", env_id)[-1])
    return re.sub(r"[_\W]+|(?<=[a-z0-9])(?=[A-Z])", " ", name).lower().strip()
