"""Soft actor-critic in chunk space (Haarnoja et al. 2018, arXiv:1812.05905): a chunk of C actions is one decision, and
what it leads to is discounted by the simulator steps that it took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor


def chunk_outcomes(rewards: Tensor, valid: Tensor, terminated: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """A chunk's reward, and the weight of the value of the state that it led to.

    With r = [1, 2, 4], all valid and gamma = 0.5 the reward is 1 + 1 + 1 and the weight 0.125; where only the first two
    steps were taken, 1 + 1 and 0.25. A termination leaves nothing to follow, a truncation does.

    Args:
        rewards: [...,C] float32.
        valid: [...,C] bool, the steps that were taken, which come first.
        terminated: [...,C] bool.

    Returns:
        [...] float32 both; 0 and 1 for a chunk without a valid step.
    """
    powers = gamma ** torch.arange(rewards.shape[-1] + 1, dtype=torch.float64)
    discounted = (rewards.double() * powers[:-1]).masked_fill(~valid, 0.0).sum(-1)
    following = powers[valid.sum(-1)].masked_fill((terminated & valid).any(-1), 0.0)
    return discounted.float(), following.float()


def soft_targets(
    rewards: Tensor, discounts: Tensor, values: Tensor, logprobs: Tensor | None, *, temperature: Tensor
) -> Tensor:
    """Targets of the critics, [B]: R + discount (min Q(s', a') - temperature log π(a'|s')).

    Args:
        rewards: [B], as :func:`chunk_outcomes` gives them; so are ``discounts``.
        values: [K,B] of the target networks that take part.
        logprobs: [B] of a'; None leaves the entropy out.
    """
    following = values.min(0).values
    if logprobs is not None:
        following = following - temperature * logprobs
    return rewards + discounts * following


def critic_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Sum over critics of the mean squared error: none has another gradient for the others being there.

    Args:
        values: [E,B].
        targets: [B].
    """
    return (values - targets).square().mean(-1).sum()


def policy_loss(
    values: Tensor,
    logprobs: Tensor,
    decisions: Tensor,
    *,
    temperature: Tensor,
    of: Literal["min", "mean"],
    penalty: float,
) -> Tensor:
    """Mean of temperature log π(a|s) - Q(s, a), and ``penalty`` times the mean of a², over decisions with a gradient.

    Args:
        values: [E,B].
        logprobs: [B].
        decisions: [B,K,A], a.
        of: the ensemble's value.
    """
    climbed = values.min(0).values if of == "min" else values.mean(0)
    return (temperature * logprobs - climbed).mean() + penalty * decisions.square().mean()


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, *, target_entropy: float) -> Tensor:
    """Its gradient raises the temperature while the entropy, the mean of -``logprobs`` ([B]), is below the target."""
    return -(log_temperature * (logprobs.detach() + target_entropy).mean())


@torch.no_grad()
def polyak(targets: Iterable[Tensor], sources: Iterable[Tensor], *, tau: float) -> None:
    """Move each target by ``tau`` of the way to its source, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
