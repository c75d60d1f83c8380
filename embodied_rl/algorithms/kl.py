"""Divergence of the policy from the reference policy. Arguments are in the order (policy, reference) everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

LOG_RATIO_LIMIT = 20.0
"""|log π - log π_ref| is cut here where it is exponentiated."""

LOWEST_LOGIT = -1e30


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-d).exp() - 1.0 + d


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: 0.5 * d.square(),
    "k3": _k3,
}
"""Of KL(π, π_ref) from ``d = log π(a) - log π_ref(a)`` of an action drawn from π (Schulman 2020, "Approximating KL
divergence"): k1 is unbiased and can be negative, k2 is biased, k3 is unbiased and never negative."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """One number an action (token), of the shape of the two arguments.

    Args:
        kind: a key of :data:`ESTIMATORS`.
        mask: bool, broadcasts to that shape; where it is false the result is 0, whatever stands there.
    """
    d = logprobs - reference_logprobs
    return ESTIMATORS[kind](d if mask is None else d.masked_fill(~mask, 0.0))


def full_kl(
    distribution_type: Callable[..., Distribution], policy: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> Tensor:
    """The exact divergence, summed over all actions (tokens) that could have been drawn.

    Args:
        policy, reference: the distributions' parameters, by their names in ``distribution_type``.

    Returns:
        [*], the shape of one draw.
    """
    own, other = (
        # Where both forbid an action, the difference of infinities would be NaN.
        {name: t.clamp(min=LOWEST_LOGIT) if name == "logits" else t for name, t in parameters.items()}
        for parameters in (policy, reference)
    )
    return kl_divergence(distribution_type(**own, validate_args=False), distribution_type(**other, validate_args=False))


class KLController:
    """The penalty's weight: fixed, or steered towards a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    After a step with divergence ``KL`` over n sequences, ``β ← β·(1 + clip(KL / target - 1, ±0.2)·n / horizon)``.

    Args:
        target_kl, horizon: None for a fixed weight.
    """

    def __init__(self, beta: float, *, target_kl: float | None = None, horizon: int | None = None) -> None:
        if (target_kl is None) != (horizon is None):
            raise ValueError(f"target_kl={target_kl}, horizon={horizon}: give both, or neither for a fixed weight")
        self.beta = beta
        self._target_kl, self._horizon = target_kl, horizon

    def update(self, kl: float, sequences: int) -> None:
        """Take in a step's mean divergence."""
        if self._target_kl is None or self._horizon is None:
            return
        error = min(max(kl / self._target_kl - 1.0, -0.2), 0.2)
        self.beta *= 1.0 + error * sequences / self._horizon
