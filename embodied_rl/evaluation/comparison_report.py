"""A comparison as tables for people, as JSON for programs, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import ASKED, Comparison, Recipe, Row
from embodied_rl.evaluation.eval_file import EPISODES
from embodied_rl.evaluation.paired import CONFIDENCE, RESAMPLES, SEED, Estimate

REPORT_VERSION: Final = 1
"""Version of the JSON report."""
_FEW_RUNS: Final = 3
_COLOURS: Final = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")


def report(recipes: Sequence[Recipe], comparisons: Sequence[Comparison], notes: Sequence[str]) -> dict[str, Any]:
    """The comparisons for programs. Rates and differences are shares in [0, 1] and [-1, 1]."""
    kind = recipes[0].runs[0].kind
    return {
        "report_version": REPORT_VERSION,
        "kind": kind,
        "method": {
            "interval": "percentile bootstrap, stratified by task",
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "seed": SEED,
            "test": "McNemar, exact, two-sided",
        },
        "recipes": [
            {
                "name": recipe.name,
                "evaluations": [
                    {
                        "path": run.path.as_posix(),
                        "policy_version": run.meta.get("policy_version"),
                        "checkpoint": run.meta.get("checkpoint"),
                    }
                    for run in recipe.runs
                ],
            }
            for recipe in recipes
        ],
        "comparisons": [_comparison(comparison, ASKED[kind]) for comparison in comparisons],
        "notes": list(notes),
    }


def _comparison(comparison: Comparison, asked: str) -> dict[str, Any]:
    found = comparison.differences
    overall = asdict(comparison.overall)
    del overall["task"], overall["label"]
    content: dict[str, Any] = {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "overall": overall,
        "per_task": [asdict(row) for row in comparison.tasks],
        f"{asked}_left_out": comparison.left_out,
    }
    if comparison.several_runs:
        first, second = (asdict(side) for side in found.sides)
        content["aggregates"] = {
            "first": first,
            "second": second,
            "change": {"mean": asdict(found.mean), "iqm": asdict(found.iqm)},
        }
    return content


def tables(
    recipes: Sequence[Recipe], comparisons: Sequence[Comparison], notes: Sequence[str]
) -> Iterator[RenderableType]:
    """The output from top to bottom. Fits 80 columns; labels wrap."""
    yield _legend(recipes)
    yield from changes(comparisons, notes)


def changes(comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> Iterator[RenderableType]:
    """The part of :func:`tables` that says by how much, task by task; not which files were compared."""
    for comparison in comparisons:
        yield _table(comparison)
        if comparison.several_runs:
            yield _aggregates(comparison)
    for text in dict.fromkeys([*notes, *(text for comparison in comparisons for text in _remarks(comparison))]):
        yield Text(f"note: {text}", style="yellow")


def _legend(recipes: Sequence[Recipe]) -> Table:
    table = _grid()
    table.add_column("")
    table.add_column("evaluation", overflow="fold", ratio=1)
    for column in ("step", "succeeded", "rate"):
        table.add_column(column, justify="right", no_wrap=True)
    for recipe in recipes:
        for run in recipe.runs:
            scores = [outcome.score for outcome in run.outcomes.values() if outcome.score is not None]
            rate = f"{100 * sum(scores) / len(scores):.1f}%" if scores else "-"
            step = str(run.meta.get("policy_version", "?"))
            path = run.path.parent.as_posix()
            table.add_row(Text(run.name, style="bold"), Text(path), step, f"{sum(scores):g}/{len(scores)}", rate)
    return table


def _table(comparison: Comparison) -> Table:
    kind = comparison.first.runs[0].kind
    names = f"{comparison.second.name} against {comparison.first.name}"
    table = _grid(f"{names}: the same {comparison.overall.pairs} {ASKED[kind]}")
    table.show_footer = True
    if kind == EPISODES:
        count = len(comparison.tasks)
        table.add_column("task", Text("all"), justify="right", no_wrap=True)
        table.add_column("instruction", Text(f"{count} task{'' if count == 1 else 's'}"), ratio=1)
    else:
        table.add_column("source", Text("all"), ratio=1)
    for header, cell in _cells(comparison, comparison.overall).items():
        table.add_column(header, cell, justify="right", no_wrap=not header.startswith(("only ", "won", "lost")))
    for row in comparison.tasks:
        task = [str(row.task), Text(row.label)] if kind == EPISODES else [Text(row.label or "-")]
        table.add_row(*task, *_cells(comparison, row).values())
    return table


def _cells(comparison: Comparison, row: Row) -> dict[str, Text]:
    """Column name -> cell."""
    first, second = comparison.first.name, comparison.second.name
    cells = {f"{first} %": Text(_percent(row.first)), f"{second} %": Text(_percent(row.second))}
    if row.won is not None:
        won, lost = (f"only {second}", f"only {first}") if len(first) == len(second) == 1 else ("won", "lost")
        cells |= {won: Text(str(row.won)), lost: Text(str(row.lost))}
    low, high = row.change.interval or (0.0, 0.0)
    style = "bold green" if low > 0 else "bold red" if high < 0 else "bold"
    cells["change"] = Text(_points(row.change.value), style=style)
    cells["95 % interval"] = Text(f"{_points(low)} to {_points(high)}" if row.change.interval else "-")
    if row.p is not None:
        cells["p"] = Text("<.001" if row.p < 0.001 else f"{row.p:.3f}")
    return cells


def _aggregates(comparison: Comparison) -> Table:
    """Mean and interquartile mean over runs x tasks."""
    found = comparison.differences
    table = _grid("over runs and tasks, 95 % intervals")
    table.add_column("")
    table.add_column("runs", justify="right")
    for header in ("mean", "interquartile mean"):
        table.add_column(header, justify="right", no_wrap=True)
    for recipe, side in zip((comparison.first, comparison.second), found.sides, strict=True):
        cells = (_with_interval(part, _percent, "%") for part in (side.mean, side.iqm))
        table.add_row(Text(recipe.name, style="bold"), str(len(recipe.runs)), *cells)
    table.add_row("difference", "", *(_with_interval(part, _points) for part in (found.mean, found.iqm)))
    return table


def _remarks(comparison: Comparison) -> Iterator[str]:
    names = f"{comparison.second.name} against {comparison.first.name}"
    asked = ASKED[comparison.first.runs[0].kind]
    if comparison.left_out:
        yield f"{names}: {comparison.left_out} prompts left out, unverified in one of the evaluations"
    if any(row.change.interval is None for row in (*comparison.tasks, comparison.overall)):
        yield (
            f"{names}: - where all pairs went alike, of which a bootstrap makes no interval; with more {asked} some "
            "might not"
        )
    if comparison.several_runs:
        for recipe in (comparison.first, comparison.second):
            runs = len(recipe.runs)
            if runs == 1:
                yield f"{recipe.name} is one run: the intervals do not know how other seeds of it would do"
            elif runs < _FEW_RUNS:
                yield f"{recipe.name} has {runs} runs: of so few a bootstrap's interval is too narrow"


def _grid(title: str | None = None) -> Table:
    grid = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    grid.pad_edge, grid.collapse_padding = False, True
    return grid


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _points(share: float) -> str:
    """In percentage points, with a sign unless it rounds to 0."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _with_interval(estimate: Estimate, form: Callable[[float], str], unit: str = "") -> str:
    text = f"{form(estimate.value)}{unit}"
    if estimate.interval is None:
        return text
    low, high = map(form, estimate.interval)
    return f"{text} ({low} to {high})"


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw each task's difference with its interval into a file; its format is that of the file's ending.

    Raises:
        UserError: matplotlib does not know the ending.
    """
    from matplotlib.figure import Figure

    rows = [*comparisons[0].tasks, comparisons[0].overall]
    figure = Figure(figsize=(8, 1.1 + 0.55 * len(rows) * max(1, 0.6 * len(comparisons))), layout="constrained")
    axes = figure.subplots()
    for index, comparison in enumerate(comparisons):
        estimates = [row.change for row in (*comparison.tasks, comparison.overall)]
        centres = 100 * np.array([estimate.value for estimate in estimates])
        low, high = 100 * np.array([estimate.interval or (estimate.value, estimate.value) for estimate in estimates]).T
        reach = np.maximum([centres - low, high - centres], 0)
        heights = -np.arange(len(rows)) - 0.6 * (index - (len(comparisons) - 1) / 2) / len(comparisons)
        name = f"{comparison.second.name} - {comparison.first.name}"
        axes.errorbar(
            centres, heights, xerr=reach, fmt="o", capsize=4, color=_COLOURS[index % len(_COLOURS)], label=name
        )
    labels = [textwrap.fill(f"{row.task}  {row.label}" if row.label else "-", 44) for row in rows[:-1]]
    axes.set_yticks([-row for row in range(len(rows))], [*labels, "all"], fontsize=9)
    axes.axhline(-len(rows) + 1.5, color="0.7", linewidth=0.8)
    axes.axvline(0, color="0.3", linewidth=1, linestyle="--")
    axes.set_xlabel("difference in percentage points, with 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(comparisons), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"--plot {path}: {error}") from None
