"""The share of completions that are right, with a confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import Final, Literal

from embodied_rl.evaluation.success import wilson_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
    """The outcome of one completion. Producer: generation worker. Consumer: metrics, sample tables, evaluations."""

    number: int
    """In the training step, or in the evaluation, over all workers."""
    prompt: str
    completion: str
    """Without its end token."""
    answer: str
    prompt_id: str = ""
    """The id of the problem as the data set gives it: the same under any chat template."""
    source: str = ""
    """Origin of the problem."""
    score: float | None
    """None: unverified."""
    length: int
    """Tokens, the end token included."""
    finish_reason: Literal["stop", "length"]


_Z: Final = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Summary of completions. Shares and means are of the verified ones, NaN without any; lengths of all."""

    completions: int
    unverified: int
    solved: int
    per_prompt: int
    """Completions of a prompt, k."""
    prompts: int
    """Prompts with a verified completion."""
    prompts_solved: int
    """Prompts with a solved completion."""
    accuracy: float
    """mean@k in [0, 1]: the share of a prompt's completions that are solved, over prompts."""
    interval: tuple[float, float]
    """95 % interval of the accuracy, in [0, 1], with prompts as the units."""
    interval_method: Literal["wilson", "normal"]
    mean_score: float
    mean_length: float
    """Tokens."""
    truncated: float
    """Share of completions cut by their length."""

    @property
    def verified(self) -> int:
        return self.completions - self.unverified

    @property
    def pass_at_k(self) -> float:
        """Share of the prompts with a solved completion, in [0, 1]."""
        return self.prompts_solved / self.prompts if self.prompts else math.nan

    @property
    def pass_interval(self) -> tuple[float, float]:
        """95 % Wilson interval of :attr:`pass_at_k`."""
        return wilson_interval(self.prompts_solved, self.prompts) if self.prompts else (0.0, 1.0)


def accuracy_of(records: Sequence[CompletionRecord], *, threshold: float, per_prompt: int = 1) -> Accuracy:
    """Sum up completions, in any order.

    Args:
        threshold: the score from which on a completion counts as solved.
        per_prompt: the completions with numbers from i * per_prompt on are of prompt i. 1: each stands for itself.

    Raises:
        ValueError: no completion.
    """
    if not records:
        raise ValueError("no completion to sum up")
    solved_of: dict[int, list[bool]] = defaultdict(list)
    for index, record in enumerate(records):
        if record.score is not None:
            # Numbers may repeat where each stands for itself: those of a training step's rounds.
            prompt = index if per_prompt == 1 else record.number // per_prompt
            solved_of[prompt].append(record.score >= threshold)
    groups = list(solved_of.values())
    scores = [record.score for record in records if record.score is not None]
    count = len(records)
    shares = [sum(group) / len(group) for group in groups]
    # fsum is correctly rounded, so the order in which workers finish cannot change the last digit.
    mean = math.fsum(shares) / len(shares) if shares else math.nan
    interval, method = _interval(shares, mean)
    return Accuracy(
        completions=count,
        unverified=count - len(scores),
        solved=sum(map(sum, groups)),
        per_prompt=per_prompt,
        prompts=len(groups),
        prompts_solved=sum(map(any, groups)),
        accuracy=mean,
        interval=interval,
        interval_method=method,
        mean_score=math.fsum(scores) / len(scores) if scores else math.nan,
        mean_length=sum(record.length for record in records) / count,
        truncated=sum(record.finish_reason == "length" for record in records) / count,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    overall: Accuracy
    sources: Mapping[str, Accuracy]
    """By name."""


def evaluation_of(records: Sequence[CompletionRecord], *, threshold: float, per_prompt: int = 1) -> Evaluation:
    """As :func:`accuracy_of`, overall and for each source."""
    parts: dict[str, list[CompletionRecord]] = defaultdict(list)
    for record in records:
        parts[record.source].append(record)
    return Evaluation(
        overall=accuracy_of(records, threshold=threshold, per_prompt=per_prompt),
        sources={name: accuracy_of(parts[name], threshold=threshold, per_prompt=per_prompt) for name in sorted(parts)},
    )


def _interval(shares: Sequence[float], mean: float) -> tuple[tuple[float, float], Literal["wilson", "normal"]]:
    """Wilson's where every prompt is right or wrong, or all are alike; else the normal one of the mean."""
    count = len(shares)
    if not count:
        return (0.0, 1.0), "wilson"
    if all(share in (0, 1) for share in shares) or len(set(shares)) == 1:
        return wilson_interval(round(mean * count), count), "wilson"
    half = _Z * stdev(shares) / math.sqrt(count)
    return (max(mean - half, 0.0), min(mean + half, 1.0)), "normal"
