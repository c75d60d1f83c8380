"""A comparison for people: what was compared, and a row a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from embodied_rl.evaluation.comparability import ASKED
from embodied_rl.evaluation.comparison import Comparison, Recipe, Row
from embodied_rl.evaluation.eval_file import EPISODES
from embodied_rl.evaluation.paired import Estimate

_FEW_RUNS = 3


def tables(
    recipes: Sequence[Recipe], comparisons: Sequence[Comparison], notes: Sequence[str]
) -> Iterator[RenderableType]:
    """What to print, from top to bottom. Fits 80 columns; labels wrap."""
    yield _legend(recipes)
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
        for named in recipe.named:
            scores = [o.score for o in named.evaluation.outcomes.values() if o.score is not None]
            rate = f"{100 * sum(scores) / len(scores):.1f}%" if scores else "-"
            step = str(named.evaluation.meta.get("policy_version", "?"))
            path = named.evaluation.path.parent.as_posix()
            table.add_row(Text(named.name, style="bold"), Text(path), step, f"{sum(scores):g}/{len(scores)}", rate)
    return table


def _table(comparison: Comparison) -> Table:
    first, second = comparison.first.name, comparison.second.name
    kind = comparison.first.runs[0].kind
    table = _grid(f"{second} against {first}: the same {comparison.overall.pairs} {ASKED[kind]}")
    table.show_footer = True
    paired = comparison.overall.won is not None
    total = _cells(comparison.overall, paired)
    if kind == EPISODES:
        table.add_column("task", Text("all"), justify="right", no_wrap=True)
        table.add_column("instruction", Text(f"{len(comparison.tasks)} task{_s(len(comparison.tasks))}"), ratio=1)
    else:
        table.add_column("source", Text("all"), ratio=1)
    won, lost = (f"only {second}", f"only {first}") if len(first) == len(second) == 1 else ("won", "lost")
    headers = [
        f"{first} %",
        f"{second} %",
        *([won, lost] if paired else []),
        "change",
        "95 % interval",
        *(["p"] if paired else []),
    ]
    for header, cell in zip(headers, total, strict=True):
        table.add_column(header, cell, justify="right", no_wrap=header not in (won, lost))
    for row in comparison.tasks:
        what = [str(row.task), Text(row.label)] if kind == EPISODES else [Text(row.label or "-")]
        table.add_row(*what, *_cells(row, paired))
    return table


def _cells(row: Row, paired: bool) -> list[Text]:
    cells = [Text(f"{100 * row.first:.1f}"), Text(f"{100 * row.second:.1f}")]
    if paired:
        cells += [Text(str(row.won)), Text(str(row.lost))]
    low, high = row.difference.interval or (0.0, 0.0)
    style = "bold green" if low > 0 else "bold red" if high < 0 else "bold"
    interval = f"{_points(low)} to {_points(high)}" if row.difference.interval else "-"
    cells += [Text(_points(row.difference.value), style=style), Text(interval)]
    if paired:
        cells.append(Text(_p(row.p)))
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
        table.add_row(Text(recipe.name, style="bold"), str(len(recipe.runs)), _share(side.mean), _share(side.iqm))
    table.add_row("difference", "", _change(found.mean), _change(found.iqm))
    return table


def _remarks(comparison: Comparison) -> Iterator[str]:
    names = f"{comparison.second.name} against {comparison.first.name}"
    asked = ASKED[comparison.first.runs[0].kind]
    if comparison.left_out:
        yield f"{names}: {comparison.left_out} prompts left out, unverified in one of the evaluations"
    if any(row.difference.interval is None for row in (*comparison.tasks, comparison.overall)):
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


def _points(share: float) -> str:
    """In percentage points, with a sign unless it rounds to 0."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _share(estimate: Estimate) -> str:
    text = f"{100 * estimate.value:.1f}%"
    if estimate.interval is None:
        return text
    low, high = estimate.interval
    return f"{text} ({100 * low:.1f} to {100 * high:.1f})"


def _change(estimate: Estimate) -> str:
    if estimate.interval is None:
        return _points(estimate.value)
    low, high = estimate.interval
    return f"{_points(estimate.value)} ({_points(low)} to {_points(high)})"


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "<.001" if value < 0.001 else f"{value:.3f}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
