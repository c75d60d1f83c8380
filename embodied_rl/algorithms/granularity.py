"""Between token, action and chunk level.

Tensors enter at the finest level that they have and leave at the level where the ratio is formed. Masks are always
brought to the same shape *before* anything is summed or counted, so a count is a count of units of that level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.algorithms.levels import LogprobLevel, RewardLevel


def reduce_to_level(tokens: Tensor, valid: Tensor, level: LogprobLevel) -> Tensor:
    """Sum token-level log-probabilities or entropies up to ``level``; steps that are not valid contribute 0.

    Args:
        tokens: [*,C,A].
        valid: [*,C] bool.

    Returns:
        [*,C,A] at token level, [*,C] at action level, [*] at chunk level.
    """
    _check_valid(tokens, valid)
    kept = tokens.masked_fill(~valid.unsqueeze(-1), 0.0)
    if level == "token_level":
        return kept
    return kept.sum(-1) if level == "action_level" else kept.sum((-2, -1))


def mask_at_level(valid: Tensor, level: LogprobLevel, action_dim: int) -> Tensor:
    """Which units of ``level`` count: a chunk does if any of its steps is valid.

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
    """Which units of ``level`` have a true token: bool [*,C,A] -> bool [*,C,A], [*,C] or [*]."""
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
            raise ValueError("action-level advantages cannot be merged into chunk-level units; see levels.check_levels")
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


def _check_valid(tokens: Tensor, valid: Tensor) -> None:
    if valid.dtype != torch.bool or valid.shape != tokens.shape[:-1]:
        raise ValueError(
            f"valid: got {list(valid.shape)} {valid.dtype}, expected {list(tokens.shape[:-1])} torch.bool "
            f"for tokens of shape {list(tokens.shape)}"
        )
