"""Losses per unit, and how units become one number.

A loss function returns one loss a unit (0 where masked) and diagnostics. :func:`token_mean` adds the units up and
divides by a denominator that the caller counted over *all* micro-batches and ranks of the optimiser step: the parts
then sum to the loss of the whole, whatever the micro-batch size or the number of ranks. Another aggregation is another
function like it. Functions work in the dtype they are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.algorithms.diagnostics import Diagnostics

LOG_RATIO_LIMIT = 20.0
"""|log r| is cut here, so that a ratio is finite (e^20 = 4.9e8) and its product with a zero advantage is 0."""


def ppo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, Diagnostics]:
    """Clipped surrogate loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with optional dual clip.

    ``L = max(-A r, -A clip(r, 1 - low, 1 + high))``, and where ``A < 0`` at most ``-c A`` (Ye et al. 2020,
    arXiv:1912.09729, eq. 5). All tensors have one shape: units at the log-probability level.

    Args:
        logprobs: under the weights being trained, with gradient.
        old_logprobs: under the behaviour policy.
        clip_ratio_high: None takes ``clip_ratio_low``.
        clip_ratio_c: the dual clip's c > 1; None switches it off.

    Returns:
        Unit losses and ``ratio``, ``ratio_max``, ``clip_fraction_low`` (A < 0, r below), ``clip_fraction_high`` (A > 0,
        r above), ``clip_fraction_dual`` (A < 0, r > c; with ``clip_ratio_c``), ``approx_kl`` (k3, of old from new),
        ``policy_loss``.

    Raises:
        ValueError: shapes differ, or a hyperparameter is out of range.
    """
    _check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    high = clip_ratio_low if clip_ratio_high is None else clip_ratio_high
    if not 0.0 < clip_ratio_low <= 1.0 or high <= 0.0:
        raise ValueError(
            f"clip_ratio_low={clip_ratio_low}, clip_ratio_high={clip_ratio_high}: expected 0 < low <= 1 and high > 0"
        )
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c}: expected more than 1, or null to switch the dual clip off")

    # Filled before exp: whatever stands at a masked unit, NaN included, then reaches neither loss nor gradient.
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    units = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + high))
    if clip_ratio_c is not None:
        units = torch.where(advantages < 0.0, torch.minimum(units, -clip_ratio_c * advantages), units)

    diagnostics = Diagnostics()
    with torch.no_grad():
        bad, good = advantages < 0.0, advantages > 0.0
        diagnostics.add_mean("ratio", ratio, mask)
        diagnostics.add_max("ratio_max", ratio, mask)
        diagnostics.add_mean("clip_fraction_low", bad & (ratio < 1.0 - clip_ratio_low), mask)
        diagnostics.add_mean("clip_fraction_high", good & (ratio > 1.0 + high), mask)
        if clip_ratio_c is not None:
            diagnostics.add_mean("clip_fraction_dual", bad & (ratio > clip_ratio_c), mask)
        diagnostics.add_mean("approx_kl", ratio - 1.0 - log_ratio, mask)
        diagnostics.add_mean("policy_loss", units, mask)
    return units, diagnostics


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None = None,
    huber_delta: float | None = None,
) -> tuple[Tensor, Diagnostics]:
    """``max(h(R - V), h(R - V_clip))`` with ``V_clip = V_old + clip(V - V_old, ±value_clip)``.

    All tensors have one shape. ``h`` is Huber's loss, quadratic (``e²/2``) up to ``huber_delta`` and linear beyond;
    None: quadratic everywhere. The clip is that of PPO's reference implementation (openai/baselines ppo2).

    Returns:
        Unit losses and ``value_loss``, with ``value_clip`` also ``value_clip_fraction`` (the clipped error was larger).
    """
    _check_shapes(mask, values=values, old_values=old_values, returns=returns)
    error = (returns - values).masked_fill(~mask, 0.0)
    units = _huber(error, huber_delta)
    diagnostics = Diagnostics()
    if value_clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped = _huber((returns - clipped_values).masked_fill(~mask, 0.0), huber_delta)
        diagnostics.add_mean("value_clip_fraction", clipped > units, mask)
        units = torch.maximum(units, clipped)
    diagnostics.add_mean("value_loss", units, mask)
    return units, diagnostics


def entropy_loss(*, entropy: Tensor, mask: Tensor) -> tuple[Tensor, Diagnostics]:
    """``-entropy`` per unit, to be weighted by ``entropy_bonus``; both tensors at the entropy level.

    Returns:
        Unit losses and ``entropy``.
    """
    _check_shapes(mask, entropy=entropy)
    diagnostics = Diagnostics()
    diagnostics.add_mean("entropy", entropy, mask)
    return -entropy.masked_fill(~mask, 0.0), diagnostics


def token_mean(units: Tensor, mask: Tensor, *, denominator: float) -> Tensor:
    """This part's share of the mean over all valid units: ``Σ unit·mask / denominator``.

    Args:
        denominator: the number of valid units in the whole optimiser step, over all micro-batches and ranks.

    Raises:
        ValueError: a denominator that is not positive: then nothing is valid, and the step has to be skipped.
    """
    if denominator <= 0:
        raise ValueError(f"denominator={denominator}: the optimiser step has no valid unit; skip it")
    _check_shapes(mask, units=units)
    return units.masked_fill(~mask, 0.0).sum() / denominator


def _huber(error: Tensor, delta: float | None) -> Tensor:
    quadratic = 0.5 * error.square()
    if delta is None:
        return quadratic
    size = error.abs()
    return torch.where(size <= delta, quadratic, delta * (size - 0.5 * delta))


def _check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Nothing broadcasts in a loss: a mask of another shape would count other units than it masks."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask: got {mask.dtype}, expected torch.bool")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected the mask's {list(mask.shape)}")
