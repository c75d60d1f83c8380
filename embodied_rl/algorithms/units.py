"""Units of the loss: how tokens become units of a level, and how units become one number.

Tensors enter at the finest level that they have and leave at the level where the ratio is formed. Masks are always
brought to the same shape *before* anything is summed or counted, so a count is a count of units of that level.

Every aggregation is a weighted sum of unit losses divided by a count:

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

from embodied_rl.algorithms.statistics import Groups
from embodied_rl.schema.types import LogprobLevel, LossAggregation, RewardLevel


def reduce_to_level(tokens: Tensor, valid: Tensor, level: LogprobLevel) -> Tensor:
    """Sum token-level log-probabilities or entropies up to ``level``; steps that are not valid contribute 0.

    Args:
        tokens: [*,C,A].
        valid: [*,C] bool.

    Returns:
        [*,C,A] at token level, [*,C] at action level, [*] at chunk level.
    """
    if valid.dtype != torch.bool or valid.shape != tokens.shape[:-1]:
        raise ValueError(
            f"valid: got {list(valid.shape)} {valid.dtype}, expected {list(tokens.shape[:-1])} torch.bool "
            f"for tokens of shape {list(tokens.shape)}"
        )
    kept = tokens.masked_fill(~valid.unsqueeze(-1), 0.0)
    if level == "token_level":
        return kept
    return kept.sum(-1) if level == "action_level" else kept.sum((-2, -1))


def mask_at_level(valid: Tensor, level: LogprobLevel, action_dim: int) -> Tensor:
    """The units of ``level`` that count: a chunk does if any of its steps is valid.

    Args:
        valid: [*,C] bool.
        action_dim: A, used at token level.

    Returns:
        bool [*,C,A], [*,C] or [*], in the shape :func:`reduce_to_level` gives at that level.
    """
    if level == "token_level":
        return valid.unsqueeze(-1).expand(*valid.shape, action_dim)
    return valid if level == "action_level" else valid.any(-1)


def any_at_level(tokens: Tensor, level: LogprobLevel) -> Tensor:
    """The units of ``level`` that have a true token: bool [*,C,A] -> bool [*,C,A], [*,C] or [*]."""
    if level == "token_level":
        return tokens
    return tokens.any(-1) if level == "action_level" else tokens.flatten(-2).any(-1)


def broadcast_to_level(
    units: Tensor, reward_level: RewardLevel, level: LogprobLevel, *, num_action_chunks: int, action_dim: int
) -> Tensor:
    """Copy advantages from the reward level to the (same or finer) log-probability level.

    Args:
        units: [*] at chunk level, [*,C] at action level.

    Returns:
        [*,C,A], [*,C] or [*]; a view where it is larger than ``units``.

    Raises:
        ValueError: the reward level is finer than ``level``.
    """
    if reward_level == "action_level":
        if level == "chunk_level":
            raise ValueError("action-level advantages cannot be merged into chunk-level units (catalog.check_levels)")
        if units.shape[-1] != num_action_chunks:
            raise ValueError(
                f"advantages: got {list(units.shape)}, expected [..., {num_action_chunks}] at action level"
            )
        steps = units
    elif level == "chunk_level":
        return units
    else:
        steps = units.unsqueeze(-1).expand(*units.shape, num_action_chunks)
    return steps if level == "action_level" else steps.unsqueeze(-1).expand(*steps.shape, action_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the units of an optimiser step's samples."""

    per_sample: Tensor | float
    """[B] float64: the weight of each of the sample's units; a number: it is the same for all."""
    count: float
    """This rank's share of the divisor."""


def units_of(mask: Tensor) -> Tensor:
    """[B] float64: the number of each sample's valid units, from [B,*L] bool."""
    return mask.reshape(len(mask), -1).sum(1).double()


def weigh(units: Tensor, sequence_ids: Tensor, *, mode: LossAggregation, scale_factor: float) -> Weights:
    """Weights of one rank's samples in an optimiser step.

    Args:
        units: [B] as :func:`units_of`.
        sequence_ids: [B] int64.
        scale_factor: K of ``seq-mean-token-sum-norm`` (Dr. GRPO, arXiv:2503.20783: the longest possible sequence).
    """
    if mode == "token-mean":
        return Weights(per_sample=1.0, count=float(units.sum()))
    sequences = Groups.of(sequence_ids)
    lengths = sequences.sum(units)
    if mode == "seq-mean-token-mean":
        weights = 1.0 / lengths.clamp(min=1.0)[sequences.member_of]
    else:
        weights = 1.0 if mode == "seq-mean-token-sum" else 1.0 / scale_factor
    return Weights(per_sample=weights, count=float((lengths > 0).sum()))


def aggregate(units: Tensor, mask: Tensor, *, weights: Tensor | float, denominator: float) -> Tensor:
    """This part's share of the aggregated loss: ``Σ weight·unit·mask / denominator``.

    Args:
        units: [B,*L].
        weights: [B], those of these samples; a number: that of all.
        denominator: the count of :func:`weigh` over all ranks. With 0 nothing is valid anywhere, and the share is 0.

    Raises:
        ValueError: shapes that differ, or valid units with a denominator of 0.
    """
    each = isinstance(weights, Tensor)
    if mask.dtype != torch.bool or mask.shape != units.shape or (each and weights.shape != units.shape[:1]):
        raise ValueError(
            f"got units {list(units.shape)}, mask {list(mask.shape)} {mask.dtype}, weights "
            f"{list(weights.shape) if each else weights}; expected a bool mask of the units' shape and one weight a "
            "sample, or one for all"
        )
    if denominator <= 0 and mask.any():
        raise ValueError(f"denominator={denominator}, but some units are valid")
    kept = units.masked_fill(~mask, 0.0)
    if each:
        kept = kept * weights.to(units.dtype).reshape(-1, *[1] * (units.ndim - 1))
    factor = (1.0 if each else weights) / (denominator if denominator > 0 else 1.0)
    return kept.sum() * factor
