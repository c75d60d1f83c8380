"""Accuracy of completions, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from embodied_rl.evaluation.success import wilson_interval
from embodied_rl.language.accuracy import CompletionRecord, accuracy_of, evaluation_of


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


def numbered(*groups: tuple[float | None, ...], source: str = "a", first: int = 0) -> list[CompletionRecord]:
    size = len(groups[0])
    return [
        record(score, number=(first + prompt) * size + place, source=source)
        for prompt, group in enumerate(groups)
        for place, score in enumerate(group)
    ]


def test_mean_and_pass_at_k_are_over_prompts() -> None:
    """By hand: shares 1/2, 0, 1 (of one verified) and 1, so mean@2 is 5/8, pass@2 is 3/4."""
    records = numbered((1, 0), (0, 0), (None, 1), (1, 1), (None, None))
    found = accuracy_of(records[::-1], threshold=1.0, per_prompt=2)
    assert (found.completions, found.unverified, found.solved, found.prompts, found.prompts_solved) == (10, 3, 4, 4, 3)
    assert found.accuracy == pytest.approx(5 / 8)
    assert found.pass_at_k == pytest.approx(3 / 4)
    assert found.pass_interval == wilson_interval(3, 4)
    # Shares 0.5, 0, 1, 1 have the deviation 0.478714, so the interval is 0.625 -+ 1.959964 * 0.478714 / 2.
    assert found.interval_method == "normal"
    assert found.interval == (pytest.approx(0.155869, abs=1e-5), 1.0)


def test_prompts_are_the_units_of_the_interval() -> None:
    alike = accuracy_of(numbered((1, 1), (0, 0), (0, 0)), threshold=1.0, per_prompt=2)
    assert (alike.interval, alike.interval_method) == (wilson_interval(1, 3), "wilson"), "six answers say what three do"
    assert accuracy_of(numbered((0, 0)), threshold=1.0, per_prompt=2).interval == wilson_interval(0, 1)
    alone = accuracy_of(numbered((1, 1), (0, 0), (0, 0)), threshold=1.0)
    assert (alone.interval, alone.accuracy) == (wilson_interval(2, 6), pytest.approx(1 / 3))


def test_numbers_that_repeat_are_of_different_prompts_where_each_stands_for_itself() -> None:
    found = accuracy_of([record(1.0), record(0.0)], threshold=1.0)
    assert (found.prompts, found.accuracy, found.interval) == (2, 0.5, wilson_interval(1, 2))


def test_each_source_is_counted_by_itself() -> None:
    records = [*numbered((1, 0), (1, 1), source="b"), *numbered((0, 0), source="a", first=2)]
    found = evaluation_of(records, threshold=1.0, per_prompt=2)
    assert list(found.sources) == ["a", "b"]
    assert found.sources["a"].accuracy == 0
    assert found.sources["b"].accuracy == pytest.approx(3 / 4)
    assert found.overall.accuracy == pytest.approx(1 / 2)
    assert found.overall.pass_at_k == pytest.approx(2 / 3)
