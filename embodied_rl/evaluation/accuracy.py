"""How many completions are right, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embodied_rl.evaluation.success import wilson_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
    """How one completion went. Producer: generation worker. Consumer: metrics, sample tables, evaluations."""

    number: int
    """In the training step, or in the evaluation, over all workers."""
    prompt: str
    completion: str
    """Without its end token."""
    answer: str
    score: float | None
    """None: unverified."""
    length: int
    """Tokens, the end token included."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What completions were worth. Shares and means are of the verified ones, NaN without any; lengths of all."""

    completions: int
    unverified: int
    solved: int
    interval: tuple[float, float]
    """95 % Wilson interval of the accuracy, in [0, 1]; as if completions were independent, so for one per prompt."""
    mean_score: float
    mean_length: float
    """Tokens."""
    truncated: float
    """Share that was cut by its length."""

    @property
    def verified(self) -> int:
        return self.completions - self.unverified

    @property
    def accuracy(self) -> float:
        """In [0, 1]."""
        return self.solved / self.verified if self.verified else math.nan


def accuracy_of(records: Sequence[CompletionRecord], *, threshold: float) -> Accuracy:
    """Sum up completions, in any order.

    Args:
        threshold: the score from which on a completion counts as solved.

    Raises:
        ValueError: no completion.
    """
    if not records:
        raise ValueError("no completion to sum up")
    scores = [record.score for record in records if record.score is not None]
    solved, count = sum(score >= threshold for score in scores), len(records)
    return Accuracy(
        completions=count,
        unverified=count - len(scores),
        solved=solved,
        interval=wilson_interval(solved, len(scores)) if scores else (0.0, 1.0),
        # fsum is correctly rounded, so the order in which workers finish cannot change the last digit.
        mean_score=math.fsum(scores) / len(scores) if scores else math.nan,
        mean_length=sum(record.length for record in records) / count,
        truncated=sum(record.finish_reason == "length" for record in records) / count,
    )
