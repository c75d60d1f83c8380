"""Losses per unit.

A loss function returns one loss a unit (0 where masked) and diagnostics; ``units.aggregate`` makes them one number. All
tensors have the mask's shape [B,*L]: B samples, units at the log-probability level. Functions work in the dtype that
they are given, and no masked unit has an influence on anything, whatever stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.schema.types import RatioLevel, WeightCap

LOG_RATIO_LIMIT = 20.0
"""|log r| is cut here, so that a ratio is finite (e^20 = 4.9e8) and its product with a zero advantage is 0."""
LOWEST_LOGIT = -1e30


def ppo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
    importance_sampling_level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """Clipped surrogate loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with optional dual clip.

    ``L = max(-A r, -A clip(r, 1 - low, 1 + high))``, and where ``A < 0`` at most ``-c A`` (Ye et al. 2020,
    arXiv:1912.09729, eq. 5).

    Args:
        logprobs: under the weights being trained, with gradient.
        old_logprobs: under the behaviour policy.
        clip_ratio_high: None takes ``clip_ratio_low``.
        clip_ratio_c: the dual clip's c > 1; None switches it off.
        importance_sampling_level: see :func:`log_ratios`; ``sequence`` is GSPO's loss (arXiv:2507.18071, eq. 5).

    Returns:
        Unit losses and ``ratio``, ``ratio_max``, ``clip_fraction_low`` (A < 0, r below), ``clip_fraction_high`` (A > 0,
        r above), ``clip_fraction_dual`` (A < 0, r > c; with ``clip_ratio_c``), ``approx_kl`` (k3, of old from new),
        ``policy_loss``.

    Raises:
        ValueError: shapes differ, or a hyperparameter is out of range.
    """
    _check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = log_ratios(logprobs, old_logprobs, mask, importance_sampling_level)
    units, diagnostics = _clipped(log_ratio, advantages, mask, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    diagnostics.add_mean("policy_loss", units, mask, zeroed=True)
    return units, diagnostics


def decoupled_ppo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
    importance_sampling_level: RatioLevel = "token",
    behav_imp_weight_cap: float | None = None,
    behav_imp_weight_mode: WeightCap = "mask",
) -> tuple[Tensor, Diagnostics]:
    """PPO whose clip is about a proximal policy that is newer than the behaviour policy (Hilton et al. 2022,
    arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298, eq. 5), or as new but computed otherwise.

    ``L = w · L_PPO(r)`` with ``r = π / π_proximal`` and ``w = π_proximal / π_behaviour``, which has no gradient. With
    equal policies it is :func:`ppo_policy_loss`.

    Args:
        proximal_logprobs: without gradient.
        behav_imp_weight_mode: ``truncate`` takes ``min(w, behav_imp_weight_cap)`` for w (truncated importance sampling,
            Ionides 2008; IMPALA, arXiv:1802.01561, section 4.1); with ``mask`` units above are left out by ``mask``.

    Returns:
        As :func:`ppo_policy_loss`, its ratios being those to the proximal policy, and ``behaviour_weight``,
        ``behaviour_weight_max`` before they are cut; with ``truncate`` also ``behaviour_capped``, the share that is.
    """
    _check_shapes(
        mask,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        proximal_logprobs=proximal_logprobs,
        advantages=advantages,
    )
    log_ratio = log_ratios(logprobs, proximal_logprobs, mask, importance_sampling_level)
    weight = log_ratios(proximal_logprobs.detach(), old_logprobs, mask, importance_sampling_level).exp()
    clipped, diagnostics = _clipped(log_ratio, advantages, mask, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    diagnostics.add_mean("behaviour_weight", weight, mask)
    diagnostics.add_max("behaviour_weight_max", weight, mask)
    if behav_imp_weight_cap is not None and behav_imp_weight_mode == "truncate":
        diagnostics.add_mean("behaviour_capped", weight > behav_imp_weight_cap, mask)
        weight = weight.clamp(max=behav_imp_weight_cap)
    units = weight * clipped
    diagnostics.add_mean("policy_loss", units, mask, zeroed=True)
    return units, diagnostics


def aipo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    aipo_rho: float,
    importance_sampling_level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """Importance weights cut on one side only: ``L = -min(r, ρ) A`` (AIPO, arXiv:2505.24034, section 5).

    Nothing stops a unit below ρ, so stale samples go on teaching; above it a unit has no gradient.

    Returns:
        Unit losses and ``ratio``, ``ratio_max``, ``clip_fraction_high`` (r > ρ), ``approx_kl``, ``policy_loss``.
    """
    _check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = log_ratios(logprobs, old_logprobs, mask, importance_sampling_level)
    ratio = log_ratio.exp()
    units = -ratio.clamp(max=aipo_rho) * advantages.masked_fill(~mask, 0.0)
    diagnostics = _ratio_diagnostics(ratio, log_ratio, mask)
    diagnostics.add_mean("clip_fraction_high", ratio > aipo_rho, mask)
    diagnostics.add_mean("policy_loss", units, mask, zeroed=True)
    return units, diagnostics


def log_ratios(new: Tensor, old: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """``new - old``, 0 where masked, cut at ±:data:`LOG_RATIO_LIMIT`.

    At the ``sequence`` level every unit of a sample gets the mean over the sample's valid units, with its gradient
    through all of them (GSPO, arXiv:2507.18071, eq. 7). A sample is a completion, or the chunk that a policy decides at
    once.
    """
    # Filled before anything is computed: what stands at a masked unit, NaN included, reaches neither loss nor gradient.
    log_ratio = (new - old).masked_fill(~mask, 0.0)
    if level == "sequence":
        units = tuple(range(1, mask.ndim))
        if units:
            count = mask.sum(units, keepdim=True).clamp(min=1)
            log_ratio = (log_ratio.sum(units, keepdim=True) / count).expand_as(mask).masked_fill(~mask, 0.0)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def loglinear_proximal_logprobs(logprobs: Tensor, old_logprobs: Tensor, policy_version: Tensor, version: int) -> Tensor:
    """Proximal log-probabilities without a forward pass of their own: between behaviour and present, by staleness.

    ``log π_b + α (log π - log π_b)`` with ``α = clip((v - 1 - v_b) / (v - v_b), 0, 1)``, where v - 1 is the version
    that the update starts from: samples of that version have α = 0 (A-3PO, arXiv:2512.06547).

    Args:
        logprobs: [B,*L]; its gradient is cut.
        policy_version: [B] int64, v_b.
        version: v, which this update makes.
    """
    stale = (version - policy_version).double()
    alpha = torch.where(stale > 0, (stale - 1.0) / stale.clamp(min=1.0), 0.0).clamp(0.0, 1.0).to(logprobs.dtype)
    alpha = alpha.reshape(-1, *[1] * (logprobs.ndim - 1))
    return old_logprobs + alpha * (logprobs.detach() - old_logprobs)


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

    ``h`` is Huber's loss, quadratic (``e²/2``) up to ``huber_delta`` and linear beyond; None: quadratic everywhere. The
    clip is that of PPO's reference implementation (openai/baselines ppo2).

    Returns:
        Unit losses and ``value_loss``, with ``value_clip`` also ``value_clip_fraction`` (the clipped error was larger).
    """
    _check_shapes(mask, values=values, old_values=old_values, returns=returns)
    error = (returns - values).masked_fill(~mask, 0.0)
    units = _huber(error, huber_delta)
    diagnostics = Diagnostics()
    if value_clip is not None:
        clipped_values = values.clamp(old_values - value_clip, old_values + value_clip)
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


def nll_loss(*, logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Diagnostics]:
    """``-log π`` per unit: imitation of the units in ``mask``.

    Returns:
        Unit losses and ``nll``.
    """
    _check_shapes(mask, logprobs=logprobs)
    units = -logprobs.masked_fill(~mask, 0.0)
    diagnostics = Diagnostics()
    diagnostics.add_mean("nll", units, mask)
    return units, diagnostics


def nll_policy_loss(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Diagnostics]:
    """Negative log-likelihood of what was demonstrated. Who demonstrated it, and with which reward, does not count.

    Args:
        logprobs: under the weights being trained, with gradient.
        mask: the units of the demonstration.

    Returns:
        Unit losses and ``policy_loss``.
    """
    del old_logprobs, advantages
    units = -logprobs
    diagnostics = Diagnostics()
    diagnostics.add_mean("policy_loss", units, mask)
    return units, diagnostics


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-d).exp() - 1.0 + d


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: 0.5 * d.square(),
    "k3": _k3,
}
"""Estimators of KL(π, π_ref) from ``d = log π(a) - log π_ref(a)`` of an action drawn from π (Schulman 2020,
"Approximating KL divergence"): k1 is unbiased and can be negative, k2 is biased, k3 is unbiased and never negative."""


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


def _clipped(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float | None, c: float | None
) -> tuple[Tensor, Diagnostics]:
    """Units of the clipped surrogate, and its diagnostics."""
    high = low if high is None else high
    if not 0.0 < low <= 1.0 or high <= 0.0:
        raise ValueError(f"clip_ratio_low={low}, clip_ratio_high={high}: expected 0 < low <= 1 and high > 0")
    if c is not None and c <= 1.0:
        raise ValueError(f"clip_ratio_c={c}: expected more than 1, or null to switch the dual clip off")
    # The maximum of both terms is one term with a ratio that is clipped on the side where A lets it gain; the dual clip
    # is the other side's bound where A < 0. That is half the cost of maximum and minimum, backwards above all.
    advantages, ratio = advantages.masked_fill(~mask, 0.0), log_ratio.exp()
    bad, good = advantages < 0.0, advantages > 0.0
    highest = torch.where(good, 1.0 + high, torch.inf if c is None else c)
    units = -advantages * ratio.clamp(bad * (1.0 - low), highest)
    diagnostics = _ratio_diagnostics(ratio, log_ratio, mask)
    diagnostics.add_mean("clip_fraction_low", bad & (ratio < 1.0 - low), mask)
    diagnostics.add_mean("clip_fraction_high", good & (ratio > 1.0 + high), mask)
    if c is not None:
        diagnostics.add_mean("clip_fraction_dual", bad & (ratio > c), mask)
    return units, diagnostics


@torch.no_grad()
def _ratio_diagnostics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> Diagnostics:
    diagnostics = Diagnostics()
    diagnostics.add_mean("ratio", ratio, mask)
    diagnostics.add_max("ratio_max", ratio, mask)
    diagnostics.add_mean("approx_kl", ratio - 1.0 - log_ratio, mask, zeroed=True)
    return diagnostics


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
