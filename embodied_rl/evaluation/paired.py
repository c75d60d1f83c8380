"""Statistics of two policies on the same episodes: an exact test, and intervals by bootstrap. numpy alone.

Sources: McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages";
Efron and Tibshirani (1993), "An introduction to the bootstrap", chapter 13 (percentile intervals); Agarwal et al.
(2021), "Deep reinforcement learning at the edge of the statistical precipice", arXiv:2108.13264 (runs x tasks, IQM).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.seeding import generator

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 10_000
SEED: Final = 0
_BLOCK: Final = 2_000_000
"""Numbers drawn at once, which bounds memory."""
_ROUNDING: Final = 1e-12

Array = NDArray[np.float64]


def mcnemar(won: int, lost: int) -> float:
    """Two-sided p value of McNemar's exact test: how surprising ``won`` and ``lost`` are if either is as likely.

    Args:
        won, lost: the pairs in which only one, or only the other, succeeded. Pairs that agree say nothing.
    """
    count = won + lost
    tail = sum(math.comb(count, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**count)


def iqm(scores: Array) -> Array:
    """The interquartile mean over the last axis: the mean without the lowest and the highest quarter, each rounded
    down to whole scores."""
    ordered = np.sort(scores, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    return ordered[..., cut : count - cut].mean(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """A task's outcomes under two recipes."""

    first: Array
    """[R,n], of R runs in n episodes; each in [0, 1]."""
    second: Array
    """[Q,n], of Q runs in the same episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    interval: tuple[float, float] | None
    """None where all resamples are alike, as of pairs that are: a bootstrap then knows of no other outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One recipe over all its runs and tasks."""

    mean: Estimate
    """Success rate over all episodes."""
    iqm: Estimate
    """Interquartile mean of the success rates of runs x tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Second recipe less first, in success rate."""

    tasks: tuple[Estimate, ...]
    mean: Estimate
    iqm: Estimate
    sides: tuple[Side, Side]


def differences(tasks: Sequence[Pairs], *, resamples: int = RESAMPLES, seed: int = SEED) -> Differences:
    """Differences with percentile intervals of a bootstrap that is stratified by task.

    A resample draws each task's episodes anew, with replacement and the same ones for both recipes, and of each recipe
    and task the runs, too. So a recipe of one run is compared on other initial states than those played, and one of
    several runs also with other runs.

    Raises:
        ValueError: no task, or one without episodes.
    """
    if not tasks or any(pairs.first.shape[1] == 0 for pairs in tasks):
        raise ValueError("expected at least one task, and in each at least one episode")
    sizes = np.array([pairs.first.shape[1] for pairs in tasks], dtype=np.float64)
    weights = sizes / sizes.sum()
    drawn = [
        _resampled(pairs, resamples, generator(seed, index)) for index, pairs in enumerate(tasks)
    ]  # [resamples, runs] of each task and recipe
    found = [(pairs.first.mean(1)[None], pairs.second.mean(1)[None]) for pairs in tasks]
    values, draws = ([_aggregates(rates, side, weights) for side in (0, 1)] for rates in (found, drawn))
    first, second = (
        Side(mean=_estimate(value[0], draw[0]), iqm=_estimate(value[1], draw[1]))
        for value, draw in zip(values, draws, strict=True)
    )
    mean, iqm_change = (_estimate(values[1][k] - values[0][k], draws[1][k] - draws[0][k]) for k in (0, 1))
    return Differences(
        tasks=tuple(
            _estimate(b.mean(1) - a.mean(1), drawn_b.mean(1) - drawn_a.mean(1))
            for (a, b), (drawn_a, drawn_b) in zip(found, drawn, strict=True)
        ),
        mean=mean,
        iqm=iqm_change,
        sides=(first, second),
    )


def _resampled(pairs: Pairs, resamples: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Success rates [resamples,R] and [resamples,Q] of resampled runs in resampled episodes."""
    count = pairs.first.shape[1]
    shares = np.full(count, 1 / count)
    rates: tuple[list[Array], list[Array]] = ([], [])
    step = max(_BLOCK // count, 1)
    for start in range(0, resamples, step):
        times = rng.multinomial(count, shares, size=min(step, resamples - start)).astype(np.float64)
        for side, outcomes in enumerate((pairs.first, pairs.second)):
            rates[side].append(times @ outcomes.T / count)
    first, second = (_runs_anew(np.concatenate(blocks), rng) for blocks in rates)
    return first, second


def _runs_anew(rates: Array, rng: np.random.Generator) -> Array:
    resamples, runs = rates.shape
    if runs == 1:
        return rates
    return np.take_along_axis(rates, rng.integers(runs, size=(resamples, runs)), axis=1)


def _aggregates(rates: Sequence[tuple[Array, Array]], side: int, weights: Array) -> tuple[Array, Array]:
    """The mean over all episodes and the interquartile mean over runs x tasks, from the tasks' success rates."""
    mean = sum((weight * task[side].mean(1) for weight, task in zip(weights, rates, strict=True)), np.zeros(1))
    return mean, iqm(np.concatenate([task[side] for task in rates], 1))


def _estimate(value: Array, draws: Array) -> Estimate:
    low, high = np.quantile(draws, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    interval = None if np.ptp(draws) < _ROUNDING else (float(low), float(high))
    return Estimate(value=float(value[0]), interval=interval)
