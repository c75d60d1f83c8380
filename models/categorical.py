"""Categorical actions: their distribution and draws; continuous actions as bins, and imitation of actions between them.

Bin number b of an action dimension covers ``low + (high - low) [b, b + 1] / NUM_BINS``.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from embodied_rl.models.base import WHOLE, ActionStatistics, Truncation, check_temperature

NUM_BINS = 256
_MARGIN = 0.05
"""Part of the demonstrated range that is added at both ends."""
_NARROWEST = 0.02
"""Range of a dimension that hardly moves."""
_TWO_VALUED = 0.95
"""Share of the largest variance that a range and a mean allow; only actions at the range's ends have all of it."""
_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Float32 log-probabilities at a temperature: the one way to compute them, in generation and in training."""
    check_temperature(temperature)
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def most_likely(log_probabilities: Tensor, *, top_p: float, top_k: int | None) -> Tensor:
    """[...,K] float64 probabilities: 0 but for the ``top_k`` most likely (all for None), and of those what together
    reaches ``top_p``. They add up to less than 1; those that are as likely as the last stay.

    Args:
        log_probabilities: -inf for what is out of the question; need not be normalised.
    """
    weights = log_probabilities.double().softmax(-1)
    if top_k is not None and top_k < weights.shape[-1]:
        weights = weights * (weights >= weights.topk(top_k).values[..., -1:])
    if top_p < 1.0:
        weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = weights.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # one stays if those before it do not reach top_p
        weights = weights.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
    return weights


def cut(log_probabilities: Tensor, truncation: Truncation) -> Tensor:
    """[...,K] float32 normalised log-probabilities of what :func:`most_likely` leaves, -inf for the rest."""
    if truncation == WHOLE:
        return log_probabilities
    left = most_likely(log_probabilities, top_p=truncation.top_p, top_k=truncation.top_k)
    return (left / left.sum(-1, keepdim=True)).log().float()


def draw(log_probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """[...,K] -> [...] int64: a sample of each distribution."""
    # argmax of (log p - log of exponential noise) is a sample from p (the Gumbel-max trick). A draw of exactly 0, which
    # float32 gives now and then, would choose its category whatever its probability.
    noise = torch.empty_like(log_probabilities).exponential_(generator=generator).clamp_(min=2.0**-25)
    return (log_probabilities - noise.log()).argmax(-1)


def draw_correlated(log_probabilities: Tensor, correlation: float, generator: torch.Generator | None) -> Tensor:
    """[N,C,A,K] -> [N,C,A] int64: a sample of each distribution, and high or low along with the chunk's other steps.

    A Gaussian copula: step c of dimension a takes the quantile ``Φ(√ρ x_a + √(1-ρ) y_ca)`` of its own distribution, x
    and y being standard normal. Each draw's own distribution, and so its log-probability, is as in :func:`draw`. Noise
    that lasts explores farther (Hollenstein et al. 2024, arXiv:2312.11091).
    """
    n, c, a, k = log_probabilities.shape
    normal = partial(torch.randn, generator=generator, device=log_probabilities.device)
    mixed = math.sqrt(correlation) * normal(n, 1, a) + math.sqrt(1.0 - correlation) * normal(n, c, a)
    quantiles = torch.special.ndtr(mixed).unsqueeze(-1)
    chosen = (log_probabilities.exp().cumsum(-1) < quantiles).sum(-1)
    # A sum that rounding leaves below the quantile must not choose what has no probability.
    last = k - 1 - (log_probabilities > -torch.inf).int().flip(-1).argmax(-1)
    return torch.minimum(chosen, last)


def chosen_logprobs(log_probabilities: Tensor, chosen: Tensor) -> Tensor:
    """[...,K] and [...] int64 -> [...]."""
    # sum, not squeeze: FSDP warns of outputs that are views.
    return log_probabilities.gather(-1, chosen.to(log_probabilities.device).unsqueeze(-1)).sum(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """[...,K] -> [...]."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def bins_to_actions(bins: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Each bin's centre, float32.

    Args:
        bins: [...,A] int64, 0 .. 255.
        low, high: [A], the first bin's lower and the last bin's upper end.
    """
    return low + (bins.float() + 0.5) * ((high - low) / NUM_BINS)


def positions_among_bins(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[...,A] float32: b for an action at the centre of bin b, and between centres in between; beyond the ends, the
    nearest."""
    return ((actions - low) * (NUM_BINS / (high - low)) - 0.5).clamp(0.0, NUM_BINS - 1.0)


def imitation_score(log_probabilities: Tensor, positions: Tensor, *, sigma: float, l1_weight: float) -> Tensor:
    """Fit of a distribution over bins to demonstrated actions: 0 is perfect, all else is negative.

    ``-KL(q || p) - l1_weight |E_p[a] - a|``, where q is a Gaussian about the demonstrated position. Distances are in
    halves of the range. Unlike the demonstrated bin's log-probability, both terms tell a near miss from a far one.

    Args:
        log_probabilities: [...,256], of p.
        positions: [...], as :func:`positions_among_bins` gives them.
        sigma: q's standard deviation, in bins.
    """
    bins = torch.arange(NUM_BINS, dtype=positions.dtype, device=positions.device)
    log_target = (-0.5 * ((bins - positions.unsqueeze(-1)) / sigma).square()).log_softmax(-1)
    divergence = (log_target.exp() * (log_target - log_probabilities)).sum(-1)
    return -divergence - l1_weight * (2.0 / NUM_BINS) * (mean_position(log_probabilities) - positions).abs()


def mean_position(log_probabilities: Tensor) -> Tensor:
    """[...,256] -> [...]: the expected bin, mostly between two."""
    bins = torch.arange(NUM_BINS, dtype=log_probabilities.dtype, device=log_probabilities.device)
    return (log_probabilities.exp() * bins).sum(-1)


def median_bins(log_probabilities: Tensor) -> Tensor:
    """[...,256] -> [...]: the first bin that has half of the probability at or below it.

    Its expected distance from an action is the smallest, and unlike the most likely bin it does not jump between bins
    that are nearly as likely.
    """
    return (log_probabilities.exp().cumsum(-1) < 0.5).sum(-1).clamp(max=NUM_BINS - 1)


def about_mean(log_probabilities: Tensor, sigma: float | Tensor, share: float = 0.0) -> Tensor:
    """[...,256] -> [...,256]: logits of a Gaussian over bins about a distribution's mean, clipped to the range.

    The end bins have all that lies beyond them, as actions beyond a simulator's range are clipped, so the median is the
    mean whatever the width. Cut off instead, a Gaussian about the end of the range would have its median 0.67 standard
    deviations inside, and training would have to learn that away.

    Its variance is ``sigma² + (share · the distribution's own standard deviation)²``, in bins. The score, the
    derivative of a draw's log-probability, is then at most about 1 / share times the distribution's own. With one width
    everywhere it grows with how undecided the distribution is: between an open and a closed hand any change of the odds
    moves the mean by many bins, and noise of a few bins gets the credit.
    """
    bins = torch.arange(NUM_BINS, dtype=log_probabilities.dtype, device=log_probabilities.device)
    distances = bins - mean_position(log_probabilities).unsqueeze(-1)
    width = torch.as_tensor(sigma, dtype=distances.dtype, device=distances.device)
    if share:
        own = (log_probabilities.exp() * distances.square()).sum(-1, keepdim=True)
        width = (width.square() + share**2 * own).sqrt()
    scaled = distances / width
    logits = -0.5 * scaled.square()
    below, above = (scaled[..., :1] - 0.5 / width), (-scaled[..., -1:] - 0.5 / width)
    beyond = torch.special.log_ndtr(torch.cat([below, above], -1)) + width.log() + _LOG_ROOT_TWO_PI
    ends = torch.logaddexp(logits[..., [0, -1]], beyond)
    return torch.cat([ends[..., :1], logits[..., 1:-1], ends[..., 1:]], -1)


def bin_range(statistics: ActionStatistics) -> tuple[Tensor, Tensor]:
    """The range [A] that bins divide, within [-1, 1]: the first to the 99th percentile and a margin.

    A dimension with two values, such as a gripper that opens or closes, keeps the whole range, so that both are where
    another data set would have them.
    """
    lowest, highest, mean, std, q01, q99 = (
        torch.tensor(values, dtype=torch.float64)
        for values in (
            statistics.min,
            statistics.max,
            statistics.mean,
            statistics.std,
            statistics.q01,
            statistics.q99,
        )
    )
    margin = _MARGIN * (q99 - q01)
    missing = (_NARROWEST - (q99 - q01) - 2 * margin).clamp(min=0.0) / 2
    low, high = q01 - margin - missing, q99 + margin + missing
    most = (highest - mean) * (mean - lowest)  # Bhatia and Davis 2000
    two_valued = (most > 0) & (std.square() >= _TWO_VALUED * most)
    low = torch.where(two_valued, -1.0, low).clamp(-1.0, 1.0 - _NARROWEST)
    high = torch.where(two_valued, 1.0, high).clamp(-1.0 + _NARROWEST, 1.0)
    return low.float(), high.float()
