"""How units become one number, exactly, whatever parts they come in.

Every mode is a weighted sum of unit losses divided by a count:

=====================  ==========================  =====================
mode                   a unit's weight             the sum is divided by
=====================  ==========================  =====================
token-mean             1                           valid units
seq-mean-token-sum     1                           sequences
seq-mean-token-mean    1 / its sequence's units    sequences
seq-mean-token-sum-norm  1 / K                     sequences
=====================  ==========================  =====================

Weights and counts are those of the whole optimiser step (:func:`weigh`), the counts summed over all ranks; the parts of
:func:`aggregate` then add up to the loss of the whole, for any micro-batch size and number of ranks. A sequence is a
completion, or one rollout of an env: what of it is in the optimiser step. It is never spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.levels import LossAggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How much the units of an optimiser step's samples count."""

    per_sample: Tensor
    """[B] float64: the weight of each of the sample's units."""
    count: float
    """This rank's share of the divisor."""


def weigh(mask: Tensor, sequence_ids: Tensor, *, mode: LossAggregation, scale_factor: float) -> Weights:
    """Weights of one rank's samples in an optimiser step.

    Args:
        mask: [B,*L] bool.
        sequence_ids: [B] int64.
        scale_factor: K of ``seq-mean-token-sum-norm`` (Dr. GRPO, arXiv:2503.20783: the longest possible sequence).
    """
    units = mask.reshape(len(mask), -1).sum(1).double()
    if mode == "token-mean":
        return Weights(per_sample=torch.ones_like(units), count=float(units.sum()))
    ids, member_of = torch.unique(sequence_ids, return_inverse=True)
    lengths = units.new_zeros(len(ids)).index_add_(0, member_of, units)
    if mode == "seq-mean-token-mean":
        weights = 1.0 / lengths.clamp(min=1.0)[member_of]
    else:
        weights = torch.full_like(units, 1.0 if mode == "seq-mean-token-sum" else 1.0 / scale_factor)
    return Weights(per_sample=weights, count=float((lengths > 0).sum()))


def aggregate(units: Tensor, mask: Tensor, *, weights: Tensor, denominator: float) -> Tensor:
    """This part's share of the aggregated loss: ``Σ weight·unit·mask / denominator``.

    Args:
        units: [B,*L].
        weights: [B], those of these samples.
        denominator: the count of :func:`weigh` over all ranks. With 0 nothing is valid anywhere, and the share is 0.

    Raises:
        ValueError: shapes that differ, or valid units with a denominator of 0.
    """
    if mask.dtype != torch.bool or mask.shape != units.shape or weights.shape != units.shape[:1]:
        raise ValueError(
            f"got units {list(units.shape)}, mask {list(mask.shape)} {mask.dtype}, weights {list(weights.shape)}; "
            f"expected a bool mask of the units' shape and one weight a sample"
        )
    weighted = units.masked_fill(~mask, 0.0) * weights.to(units.dtype).reshape(-1, *[1] * (units.ndim - 1))
    if denominator <= 0:
        if mask.any():
            raise ValueError(f"denominator={denominator}, but some units are valid")
        return weighted.sum()
    return weighted.sum() / denominator
