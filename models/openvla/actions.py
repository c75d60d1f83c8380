"""Between the env's actions, normalised actions, bins and tokens.

A normalised action is in [-1, 1], where -1 and 1 are the 1st and 99th percentile of the training data, or its extremes.
Dimensions that the statistics mask out are grippers: in the data 0 is closed and 1 is open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError, suggestion

# numpy's: torch rounds four in ten of them otherwise, and an action on an edge falls into the next bin.
_EDGES = torch.from_numpy(np.linspace(-1.0, 1.0, 256))
_CENTRES = (_EDGES[:-1] + _EDGES[1:]) / 2
"""255 of them: the token above the last edge means the last centre, too."""


PolicySetup = Literal["libero", "widowx_bridge", "panda"]
Bounds = Literal["quantiles", "min_max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How an env takes actions that are in the data's units."""

    opens: float
    """The env's action that opens the gripper."""
    scale: tuple[float, ...] | None = None
    """The env's action for one unit of each dimension; None: the data are in the env's."""
    statistics: str | None = None
    """Those that such checkpoints have."""


CONVENTIONS: Final[Mapping[PolicySetup, Convention]] = {
    "libero": Convention(opens=-1.0),
    # Metres and Euler angles; an action of 1 is one metre, or a right angle.
    "widowx_bridge": Convention(opens=1.0, scale=(1.0, 1.0, 1.0, *(2.0 / math.pi,) * 3, 1.0), statistics="bridge_orig"),
    "panda": Convention(opens=1.0),
}
assert set(CONVENTIONS) == set(get_args(PolicySetup))


def bins_of(normalized: Tensor) -> Tensor:
    """int64 in 1 .. 256: how many of the 256 edges are at or below each normalised action (numpy's ``digitize``)."""
    edges = _EDGES.to(normalized.device)
    return torch.bucketize(normalized.double().clamp(-1.0, 1.0), edges, right=True)


def centres_of(bins: Tensor) -> Tensor:
    """Normalised actions, float32, of bins 1 .. 256."""
    return _CENTRES.to(bins.device)[(bins - 1).clamp(0, len(_CENTRES) - 1)].float()


class ActionCodec:
    """The conversions for one data set's statistics.

    Args:
        statistics: an entry of ``norm_stats``: ``action`` and, for policies that see it, ``proprio``, each with
            ``q01`` and ``q99``, or ``min`` and ``max``, and maybe ``mask``.
        end_of_actions: the first token id after the action tokens: bin b is token ``end_of_actions - b``.
        setup: the env's convention.
        bounds: what -1 and 1 stand for.

    Raises:
        UserError: statistics without these bounds, or of other dimensions than the convention.
    """

    def __init__(
        self,
        statistics: Mapping[str, Any],
        end_of_actions: int,
        setup: PolicySetup = "libero",
        bounds: Bounds = "quantiles",
    ) -> None:
        self._low, self._high, self._normalized = _bounds(statistics["action"], bounds)
        self._proprio = _bounds(statistics["proprio"], bounds) if "proprio" in statistics else None
        self._end = end_of_actions
        convention = CONVENTIONS[setup]
        self._opens = convention.opens
        scale = convention.scale or (1.0,) * self.action_dim
        if len(scale) != self.action_dim:
            raise UserError(
                f"model.params.policy_setup: {setup!r} has actions of {len(scale)} dimensions, the statistics of "
                f"{self.action_dim}; choose another, or other statistics with model.params.unnorm_key"
            )
        self._scale = torch.tensor(scale, dtype=torch.float64)

    @property
    def action_dim(self) -> int:
        return len(self._low)

    @property
    def state_dim(self) -> int | None:
        """Dimensions of the proprioception; None: the statistics have none."""
        return None if self._proprio is None else len(self._proprio[0])

    def tokens(self, normalized: Tensor) -> Tensor:
        return self._end - bins_of(normalized)

    def normalized(self, tokens: Tensor) -> Tensor:
        return centres_of(self._end - tokens)

    def to_env(self, normalized: Tensor) -> Tensor:
        """[...,A] normalised -> [...,A] float32 in [-1, 1], as the env takes them."""
        x = normalized.double()
        low, high, scaled = (t.to(x.device) for t in (self._low, self._high, self._normalized))
        gripper = self._opens * torch.sign(2.0 * x - 1.0)
        moved = (0.5 * (x + 1.0) * (high - low + 1e-8) + low) * self._scale.to(x.device)
        return torch.where(scaled, moved, gripper).clamp(-1.0, 1.0).float()

    def from_env(self, actions: Tensor) -> Tensor:
        """The inverse of :meth:`to_env`; beyond the statistics' bounds, the nearest."""
        x = actions.double()
        low, high, scaled = (t.to(x.device) for t in (self._low, self._high, self._normalized))
        opened = 0.5 + 0.5 * self._opens * torch.sign(x)
        moved = (2.0 * (x / self._scale.to(x.device) - low) / (high - low + 1e-8) - 1.0).clamp(-1.0, 1.0)
        return torch.where(scaled, moved, opened).float()

    def normalize_state(self, state: Tensor) -> Tensor:
        """[N,S] -> [N,S] float32 in [-1, 1]."""
        assert self._proprio is not None
        x = state.double()
        low, high, scaled = (t.to(x.device) for t in self._proprio)
        moved = 2.0 * (x - low) / (high - low + 1e-8) - 1.0
        return torch.where(scaled, moved, x).clamp(-1.0, 1.0).float()


def choose_statistics(
    norm_stats: Mapping[str, Any], *, unnorm_key: str | None, suite: str | None, setup: PolicySetup = "libero"
) -> str:
    """The key of the statistics to use: ``unnorm_key``, else ``suite`` or ``suite_no_noops``, else the convention's,
    else the only one.

    Raises:
        UserError: there is none, or the choice is not clear.
    """
    known = sorted(norm_stats)
    if unnorm_key is not None:
        if unnorm_key in norm_stats:
            return unnorm_key
        raise UserError(
            f"model.params.unnorm_key: got {unnorm_key!r}, expected one of {', '.join(known)}."
            + suggestion(unnorm_key, known)
        )
    for key in (suite, f"{suite}_no_noops", CONVENTIONS[setup].statistics):
        if key in norm_stats:
            return str(key)
    if len(known) == 1:
        return known[0]
    raise UserError(
        f"model.params.unnorm_key: not set, and the checkpoint has action statistics of "
        f"{', '.join(known) or 'nothing'}, not of {suite!r}; set it to those that fit the env"
    )


_BOUNDS: Final[Mapping[Bounds, tuple[str, str]]] = {"quantiles": ("q01", "q99"), "min_max": ("min", "max")}


def _bounds(statistics: Mapping[str, Any], bounds: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Low, high, and which dimensions they scale."""
    missing = [name for name in _BOUNDS[bounds] if name not in statistics]
    if missing:
        other = [name for name, pair in _BOUNDS.items() if set(pair) <= set(statistics)]
        raise UserError(
            f"model.params.bounds: got {bounds!r}, but the statistics have no {' and no '.join(missing)}, only "
            f"{', '.join(sorted(statistics))}; "
            + (f"use model.params.bounds={other[0]}" if other else "they are of no kind that can be used")
        )
    low, high = (torch.tensor(statistics[name], dtype=torch.float64) for name in _BOUNDS[bounds])
    mask = statistics.get("mask")
    return low, high, torch.ones(len(low), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
