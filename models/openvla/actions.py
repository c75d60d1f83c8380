"""Between the env's actions, normalised actions, bins and tokens.

A normalised action is in [-1, 1], where -1 and 1 are the 1st and 99th percentile of the training data. Dimensions that
the statistics mask out are grippers: in the data 0 is closed and 1 is open, the env closes at 1 and opens at -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError, suggestion

# numpy's: torch rounds four in ten of them otherwise, and an action on an edge falls into the next bin.
_EDGES = torch.from_numpy(np.linspace(-1.0, 1.0, 256))
_CENTRES = (_EDGES[:-1] + _EDGES[1:]) / 2
"""255 of them: the token above the last edge means the last centre, too."""


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
            ``q01``, ``q99`` and maybe ``mask``.
        end_of_actions: the first token id after the action tokens: bin b is token ``end_of_actions - b``.
    """

    def __init__(self, statistics: Mapping[str, Any], end_of_actions: int) -> None:
        action = statistics["action"]
        self._low, self._high, self._normalized = _bounds(action)
        self._proprio = _bounds(statistics["proprio"]) if "proprio" in statistics else None
        self._end = end_of_actions

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
        gripper = -torch.sign(2.0 * x - 1.0)
        moved = 0.5 * (x + 1.0) * (high - low + 1e-8) + low
        return torch.where(scaled, moved, gripper).clamp(-1.0, 1.0).float()

    def from_env(self, actions: Tensor) -> Tensor:
        """The inverse of :meth:`to_env`; beyond the statistics' bounds, the nearest."""
        x = actions.double()
        low, high, scaled = (t.to(x.device) for t in (self._low, self._high, self._normalized))
        opened = 0.5 - 0.5 * torch.sign(x)
        moved = (2.0 * (x - low) / (high - low + 1e-8) - 1.0).clamp(-1.0, 1.0)
        return torch.where(scaled, moved, opened).float()

    def normalize_state(self, state: Tensor) -> Tensor:
        """[N,S] -> [N,S] float32 in [-1, 1]."""
        assert self._proprio is not None
        x = state.double()
        low, high, scaled = (t.to(x.device) for t in self._proprio)
        moved = 2.0 * (x - low) / (high - low + 1e-8) - 1.0
        return torch.where(scaled, moved, x).clamp(-1.0, 1.0).float()


def choose_statistics(norm_stats: Mapping[str, Any], *, unnorm_key: str | None, suite: str | None) -> str:
    """The key of the statistics to use: ``unnorm_key``, else ``suite`` or ``suite_no_noops``, else the only one.

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
    for key in (suite, f"{suite}_no_noops"):
        if key in norm_stats:
            return str(key)
    if len(known) == 1:
        return known[0]
    raise UserError(
        f"model.params.unnorm_key: not set, and the checkpoint has action statistics of "
        f"{', '.join(known) or 'nothing'}, not of {suite!r}; set it to those that fit the env"
    )


def _bounds(statistics: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Low, high, and which dimensions they scale."""
    missing = [name for name in ("q01", "q99") if name not in statistics]
    if missing:
        raise UserError(
            f"model.path: the action statistics have no {' and no '.join(missing)}, only "
            f"{', '.join(sorted(statistics))}; checkpoints that normalise otherwise are not supported"
        )
    low, high = (torch.tensor(statistics[name], dtype=torch.float64) for name in ("q01", "q99"))
    mask = statistics.get("mask")
    return low, high, torch.ones(len(low), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
