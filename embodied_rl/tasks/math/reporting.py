"""Reports of language models' training: step metrics, samples, and an evaluation's table and files."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from embodied_rl.evaluation.eval_file import COMPLETIONS, FILE_NAME, SCHEMA_VERSION, number_or_null
from embodied_rl.evaluation.report import PACKAGES
from embodied_rl.evaluation.success import percentages
from embodied_rl.extras import versions
from embodied_rl.files import write_json
from embodied_rl.language.accuracy import Accuracy, CompletionRecord, Evaluation, accuracy_of
from embodied_rl.language.datasets.registry import dataset_params
from embodied_rl.models.flops import SampleCost
from embodied_rl.monitoring.peak_memory import memory_metrics
from embodied_rl.monitoring.performance import Waits, spread
from embodied_rl.monitoring.work import Flops, Work, perf_metrics
from embodied_rl.params import jsonable
from embodied_rl.schema import MathConfig
from embodied_rl.tasks.reporting import Advice, Reporter, eval_name, longest, step_problem
from embodied_rl.workers.generation import GenerationReport

SHOWN = 4
"""Completions in a printed table of samples."""
_CUT = 200
"""Characters of a text in that table."""
_LANGUAGE_PACKAGES = ("transformers", "vllm", "math-verify", "reasoning-gym")
_ADVICE = Advice(
    score="mean score",
    easier="start from a better model, or use easier prompts, more of them, or a larger algorithm.group_size",
    harder="there is little left to learn, so use harder prompts, or end here",
    equal=(
        "every prompt's completions got the same score, so the gradient is zero: it takes prompts that are solved "
        "sometimes; start from a better model, or use easier prompts, more of them, or a larger group_size"
    ),
)


def all_records(reports: Iterable[GenerationReport]) -> list[CompletionRecord]:
    """All workers' completions, by their number: the same list for any number of workers."""
    return sorted((record for report in reports for record in report.records), key=lambda record: record.number)


def rollout_metrics(rounds: Sequence[Sequence[GenerationReport]], *, threshold: float) -> dict[str, float]:
    """Metrics of a training step's completions. ``time/`` values are wall seconds, of the slowest of the workers that
    did the same.

    Args:
        rounds: the workers' reports of each round.
        threshold: the score from which on a completion counts as solved.
    """
    records = all_records(report for reports in rounds for report in reports)
    accuracy = accuracy_of(records, threshold=threshold)
    scores = [record.score for record in records if record.score is not None]
    generate_s = sum(longest(reports, "generate") for reports in rounds)
    return {
        "rollout/completions": float(accuracy.completions),
        "rollout/accuracy": accuracy.accuracy,
        "rollout/score": accuracy.mean_score,
        "rollout/score_std": pstdev(scores) if scores else math.nan,
        "rollout/length": accuracy.mean_length,
        "rollout/truncated": accuracy.truncated,
        "rollout/unverified": accuracy.unverified / accuracy.completions,
        "rollout/tokens_per_s": accuracy.mean_length * accuracy.completions / generate_s,
        "rollout/interruptions": float(max(report.interruptions for reports in rounds for report in reports)),
        "time/generate": generate_s,
        "time/reward": sum(longest(reports, "reward") for reports in rounds),
        "time/policy_load": sum(longest(reports, "load") for reports in rounds),
        "time/policy_offload": sum(longest(reports, "offload") for reports in rounds),
    } | memory_metrics("rollout", [report.peak_memory for reports in rounds for report in reports])


def perf(rounds: Sequence[Sequence[GenerationReport]], cost: SampleCost, *, group_size: int) -> dict[str, float]:
    """Metrics of the work of a training step's completions: a prompt is read once for all of its own.

    Args:
        cost: of a sample, as the actor found it.
    """
    work = []
    for reports in zip(*rounds, strict=True):  # of each worker
        lengths = torch.tensor([pair for report in reports for pair in report.lengths]).reshape(-1, 2)
        again = lengths[[row for row in range(len(lengths)) if row % group_size]] * torch.tensor([1, 0])
        flops = cost.inferred(len(lengths), lengths).model - cost.inferred(len(again), again).model
        work.append(Work(flops=Flops(model=flops), peak=reports[0].peak))
    return perf_metrics("rollout", work, sum(longest(reports, "generate") for reports in rounds))


def waits(rounds: Sequence[Sequence[GenerationReport]]) -> Waits:
    """Seconds in which workers that had finished waited for the slowest, in all of a training step's rounds."""
    return {"stragglers": sum(spread([sum(report.seconds.values()) for report in reports]) for reports in rounds)}


def eval_metrics(evaluation: Evaluation, *, seconds: float) -> dict[str, float]:
    """An evaluation's metrics; with several completions a prompt, ``pass_at_k``, too."""
    overall = evaluation.overall
    metrics = {
        "accuracy": overall.accuracy,
        "score": overall.mean_score,
        "length": overall.mean_length,
        "truncated": overall.truncated,
        "unverified": overall.unverified / overall.completions,
        "completions": float(overall.completions),
        "seconds": seconds,
    }
    if overall.per_prompt > 1:
        metrics["pass_at_k"] = overall.pass_at_k
    for name, accuracy in evaluation.sources.items():
        metrics[f"{name}/accuracy"] = accuracy.accuracy
    return metrics


def warning(metrics: Mapping[str, float], config: MathConfig) -> str | None:
    """The problem of a training step, as :func:`step_problem`; None if there is none."""
    if metrics["rollout/unverified"] == 1:
        return (
            f"no update: reward.function={config.reward.function} could verify no completion; look at the answers in "
            "the data, or raise reward.timeout or reward.params.timeout"
        )
    if metrics["actor/groups_unscored"] == 1:
        masked = metrics["rollout/truncated"] if config.reward.mask_truncated else 0.0
        return (
            f"no update: no prompt has enough completions with a score, {metrics['rollout/unverified']:.0%} are "
            f"unverified and {masked:.0%} were cut and left out (reward.mask_truncated); raise "
            "rollout.max_new_tokens, look at the answers in the data, or use a larger algorithm.group_size"
        )
    return step_problem(metrics, config, _ADVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReporter(Reporter[MathConfig]):
    """Shows an evaluation and writes it to ``<run>/eval_step_<n>/``: ``eval.json`` and ``samples.jsonl``."""

    def report(self, evaluation: Evaluation, records: Sequence[CompletionRecord], *, step: int, seconds: float) -> None:
        self.console.print(sample_table(records, title=f"{self.config.data.name} after {step} training steps"))
        if len(evaluation.sources) > 1:
            self.console.print(source_table(evaluation))
        self.console.print(summary(evaluation.overall), highlight=False)
        directory = self.run_dir / eval_name(step)
        self.write_samples(directory / "samples.jsonl", records)
        write_json(directory / FILE_NAME, self._content(evaluation, records, step=step, seconds=seconds))
        self.console.print(f"table:  {directory / FILE_NAME}", highlight=False, soft_wrap=True)

    def _content(
        self, evaluation: Evaluation, records: Sequence[CompletionRecord], *, step: int, seconds: float
    ) -> dict[str, Any]:
        """The content of eval.json. ``pc_`` values are percentages of the verified completions, lengths are tokens.

        Texts are in ``samples.jsonl``.
        """
        threshold, per_prompt = self.config.reward.success_threshold, evaluation.overall.per_prompt
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": COMPLETIONS,
            "meta": {
                **completion_conditions(self.config),
                **self.policy_facts(step),
            },
            "overall": _row(evaluation.overall),
            "sources": {name: _row(accuracy) for name, accuracy in evaluation.sources.items()},
            "completions": [_completion(record, threshold, per_prompt, step) for record in records],
            "timing": {"eval_s": round(seconds, 3)},
        }

    def write_samples(self, path: Path, records: Sequence[CompletionRecord]) -> None:
        """Every completion as a line of JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records))


def _completion(record: CompletionRecord, threshold: float, per_prompt: int, step: int) -> dict[str, Any]:
    return {
        "prompt_id": record.prompt_id,
        "prompt": record.number // per_prompt,
        "completion": record.number % per_prompt,
        "source": record.source,
        "verified": record.score is not None,
        "correct": None if record.score is None else record.score >= threshold,
        "score": number_or_null(record.score),
        "truncated": record.finish_reason == "length",
        "length": record.length,
        "policy_version": step,
    }


def _row(accuracy: Accuracy) -> dict[str, Any]:
    row = {
        "pc_accuracy": number_or_null(100 * accuracy.accuracy),
        "pc_accuracy_ci95": [round(100 * end, 4) for end in accuracy.interval],
        "ci_method": accuracy.interval_method,
        "n_completions": accuracy.completions,
        "n_per_prompt": accuracy.per_prompt,
        "n_solved": accuracy.solved,
        "n_unverified": accuracy.unverified,
        "avg_score": number_or_null(accuracy.mean_score),
        "avg_length": round(accuracy.mean_length, 4),
        "pc_truncated": round(100 * accuracy.truncated, 4),
    }
    if accuracy.per_prompt > 1:
        row["pc_pass_at_k"] = number_or_null(100 * accuracy.pass_at_k)
        row["pc_pass_at_k_ci95"] = [round(100 * end, 4) for end in accuracy.pass_interval]
    return row


def summary(accuracy: Accuracy) -> str:
    """One line."""
    k = accuracy.per_prompt
    unverified = f", {accuracy.unverified} unverified" if accuracy.unverified else ""
    found = f"{accuracy.solved}/{accuracy.verified}"
    rate = f"{accuracy.accuracy:.1%} (95 % interval {percentages(accuracy.interval)})"
    if k == 1:
        head = f"accuracy {found} = {rate}"
    else:  # over prompts, so it is not the quotient where some are unverified
        passed = f"{accuracy.pass_at_k:.1%} ({percentages(accuracy.pass_interval)})"
        head = f"mean@{k} {rate}, {found} solved, pass@{k} {passed}"
    return f"{head}{unverified}, {accuracy.mean_length:.1f} tokens, {accuracy.truncated:.1%} cut"


def source_table(evaluation: Evaluation) -> Table:
    """A row for each source."""
    k = evaluation.overall.per_prompt
    table = Table(title="by source", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("source", overflow="fold")
    for name in ("solved", "accuracy" if k == 1 else f"mean@{k}", "95 % interval", *([f"pass@{k}"] if k > 1 else [])):
        table.add_column(name, justify="right")
    for name, row in evaluation.sources.items():
        cells = [f"{row.solved}/{row.verified}", f"{row.accuracy:.1%}", percentages(row.interval)]
        table.add_row(Text(name), *cells, *([f"{row.pass_at_k:.1%}"] if k > 1 else []))
    return table


def sample_text(records: Sequence[CompletionRecord]) -> str:
    """The first few completions, as Markdown for loggers."""
    return "\n\n---\n\n".join(
        "\n\n".join(
            f"**{name}**\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
            for name, text in (
                ("prompt", record.prompt),
                ("completion", record.completion),
                ("answer", record.answer),
                ("score", "unverified" if record.score is None else f"{record.score:g}"),
            )
        )
        for record in records[:SHOWN]
    )


def sample_table(records: Sequence[CompletionRecord], *, title: str) -> Table:
    """The first few completions."""
    table = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("prompt", "completion", "answer"):
        table.add_column(name, overflow="fold")
    table.add_column("score", justify="right")
    for record in records[:SHOWN]:
        score = "?" if record.score is None else f"{record.score:g}"
        cut = " [cut]" if record.finish_reason == "length" else ""
        texts = (_shortened(text) for text in (record.prompt, record.completion + cut, record.answer))
        table.add_row(*(Text(text) for text in texts), score)
    return table


def _shortened(text: str) -> str:
    """Both ends of a long text; more of its end, where the question is and the answer."""
    return text if len(text) <= _CUT else f"{text[: _CUT // 4]} ... {text[-3 * _CUT // 4 :]}"


def completion_conditions(config: MathConfig) -> dict[str, Any]:
    """The settings, beside the model, that decide how completions go and are scored; ``meta`` of ``eval.json``."""
    data, reward, rollout = config.data, config.reward, config.rollout
    return {
        "data": data.name,
        "dataset": data.dataset,
        "params": jsonable(dataset_params(data.dataset, data.params)),
        "eval_size": data.eval_size,
        "max_prompt_length": data.max_prompt_length,
        "reward": reward.function,
        "reward_params": jsonable(reward.params),
        "success_threshold": reward.success_threshold,
        "backend": rollout.backend,
        "max_new_tokens": rollout.max_new_tokens,
        "min_new_tokens": rollout.min_new_tokens,
        "stop": list(rollout.stop),
        "temperature": config.algorithm.sampling_params.temperature_eval,
        "completions_per_prompt": data.eval_completions,
        "versions": {"python": platform.python_version(), **versions(*PACKAGES, *_LANGUAGE_PACKAGES)},
    }
