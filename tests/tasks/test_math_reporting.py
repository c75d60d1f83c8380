"""What an evaluation of completions says: files, tables, metrics."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from embodied_rl.language.accuracy import CompletionRecord, evaluation_of
from embodied_rl.tasks.math.reporting import MathReporter, eval_metrics, sample_text
from tests.configs import small_math


def records(per_prompt: int = 2) -> list[CompletionRecord]:
    return [
        CompletionRecord(
            number=number,
            prompt_id=f"id{number // per_prompt}",
            prompt=f"prompt {number // per_prompt}",
            completion=f"completion {number}\nline 2",
            answer="7",
            source="first" if number < 4 else "second",
            score=float(number in (0, 4, 5)),
            length=number + 1,
            finish_reason="stop",
        )
        for number in range(8)
    ]


def test_an_evaluation_with_several_completions_a_prompt(tmp_path: Path) -> None:
    config = small_math("data.eval_completions=2", "algorithm.sampling_params.temperature_eval=0.7")
    output = io.StringIO()
    console = Console(file=output, width=160)
    evaluation = evaluation_of(records(), threshold=1.0, per_prompt=2)
    reporter = MathReporter(config=config, run_dir=tmp_path, console=console, checkpoint=None, first_step=0)
    reporter.report(evaluation, records(), step=3, seconds=1.0)
    said = output.getvalue()
    assert "mean@2 37.5% (95 % interval" in said
    assert "3/8 solved" in said
    assert "pass@2 50.0%" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["first", "1/4", "25.0%", "0.0", "-", "74.0", "50.0%"] in rows
    assert any(row[:3] == ["second", "2/4", "50.0%"] for row in rows)
    report = json.loads((tmp_path / "eval_step_000003" / "eval.json").read_text())
    assert report["overall"]["pc_accuracy"] == 37.5
    assert report["overall"]["pc_pass_at_k"] == 50.0
    assert report["overall"]["ci_method"] == "normal"
    assert {name: row["pc_accuracy"] for name, row in report["sources"].items()} == {"first": 25.0, "second": 50.0}
    assert (report["meta"]["completions_per_prompt"], report["meta"]["temperature"]) == (2, 0.7)
    assert (report["schema_version"], report["kind"], len(report["completions"])) == (2, "completions", 8)
    assert report["completions"][5] == {
        "prompt_id": "id2",
        "prompt": 2,
        "completion": 1,
        "source": "second",
        "verified": True,
        "correct": True,
        "score": 1.0,
        "truncated": False,
        "length": 6,
        "policy_version": 3,
    }
    assert len((tmp_path / "eval_step_000003" / "samples.jsonl").read_text().splitlines()) == 8
    metrics = eval_metrics(evaluation, seconds=1.0)
    assert metrics["pass_at_k"] == 0.5
    assert (metrics["first/accuracy"], metrics["second/accuracy"]) == (0.25, 0.5)


def test_one_completion_and_one_source_need_no_table(tmp_path: Path) -> None:
    output = io.StringIO()
    evaluation = evaluation_of(records()[:4], threshold=1.0)
    reporter = MathReporter(
        config=small_math(), run_dir=tmp_path, console=Console(file=output, width=160), checkpoint=None, first_step=0
    )
    reporter.report(evaluation, records()[:4], step=0, seconds=1.0)
    assert "accuracy 1/4 = 25.0%" in output.getvalue()
    assert "by source" not in output.getvalue()
    assert "pass@" not in output.getvalue()
    assert "pass_at_k" not in eval_metrics(evaluation, seconds=1.0)


def test_several_completions_of_the_likeliest_tokens_are_refused() -> None:
    with pytest.raises(Exception, match=r"data.eval_completions: got 4, which would all be the same"):
        small_math("data.eval_completions=4")


def test_samples_are_markdown_for_loggers() -> None:
    text = sample_text(records()[:1])
    assert "**prompt**\n\n    prompt 0" in text
    assert "**completion**\n\n    completion 0\n    line 2" in text
    assert "**score**\n\n    1" in text
