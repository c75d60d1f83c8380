"""Accuracy of completions, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from embodied_rl.evaluation.accuracy import CompletionRecord, accuracy_of
from embodied_rl.evaluation.success import wilson_interval


def record(score: float | None, **changes: Any) -> CompletionRecord:
    fields: dict[str, Any] = {"number": 0, "prompt": "p", "completion": "c", "answer": "a", "length": 10}
    return CompletionRecord(score=score, finish_reason="stop", **{**fields, **changes})


def test_unverified_completions_are_left_out_of_the_rate_and_kept_in_the_lengths() -> None:
    found = accuracy_of([record(1.0), record(0.5), record(0.0, length=30), record(None, length=50)], threshold=0.5)
    assert (found.completions, found.unverified, found.verified, found.solved) == (4, 1, 3, 2)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.interval == wilson_interval(2, 3)
    assert found.mean_score == pytest.approx(0.5)
    assert found.mean_length == 25
    assert found.truncated == 0


def test_cut_completions_are_counted() -> None:
    record_cut = CompletionRecord(
        number=1, prompt="p", completion="c", answer="a", score=0.0, length=4, finish_reason="length"
    )
    assert accuracy_of([record(1.0), record_cut], threshold=1.0).truncated == 0.5


def test_nothing_verified_is_no_accuracy_and_no_zero() -> None:
    found = accuracy_of([record(None)], threshold=1.0)
    assert math.isnan(found.accuracy)
    assert math.isnan(found.mean_score)
    assert found.interval == (0.0, 1.0)


def test_no_completion_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no completion"):
        accuracy_of([], threshold=1.0)
