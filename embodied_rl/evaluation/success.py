"""Success rates per task, with confidence intervals, and their table on a console."""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # contracts import torch
    from embodied_rl.contracts import EpisodeRecord

CONFIDENCE = 0.95
"""Level of the intervals in a success table."""
_NAME_LENGTH = 64
_CHART_CELLS = 21
_CHART_AXIS = "0 %".ljust(_CHART_CELLS - 5) + "100 %"
_CHART_MIN_WIDTH = 120
_DETAILS_MIN_WIDTH = 100


def wilson_interval(successes: int, episodes: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval for a success probability, both ends in [0, 1].

    Unlike the normal approximation it does not collapse to a point at 0 or all successes, so it suits the few episodes
    a simulator affords. Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".

    Raises:
        ValueError: not 0 <= successes <= episodes, no episodes, or confidence outside (0, 1).
    """
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"got {successes} successes of {episodes} episodes, expected 0 <= successes <= episodes >= 1")
    if not 0 < confidence < 1:
        raise ValueError(f"got confidence {confidence}, expected a number between 0 and 1, for example 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / episodes
    spread = z * math.sqrt(rate * (1 - rate) / episodes + (z / (2 * episodes)) ** 2)
    centre = rate + z * z / (2 * episodes)
    scale = 1 + z * z / episodes
    # At the extremes the formula gives exactly 0 and 1; floating point misses them by an epsilon.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == episodes else (centre + spread) / scale
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRow:
    """The episodes of one task, of a suite, or all of them."""

    task_id: int | None
    """None in the row of a suite and in the overall row."""
    instruction: str
    episodes: int
    successes: int
    interval: tuple[float, float]
    """95 % Wilson interval of the success rate, in [0, 1]."""
    mean_length: float
    """Simulator steps, over all episodes."""
    mean_success_length: float | None
    """Simulator steps, over the successful episodes; None without any."""
    mean_return: float
    failures: int = 0
    """Episodes that the task ended without success; the other unsuccessful ones ran out of time."""

    @property
    def success_rate(self) -> float:
        """In [0, 1]."""
        return self.successes / self.episodes


def task_name(task_id: int | None, instruction: str) -> str:
    """A task as metrics and files name it: ``03_put_the_bowl_on_the_plate``."""
    words = re.findall(r"[a-z0-9]+", instruction.lower())
    return textwrap.shorten(f"{task_id:02d} {' '.join(words)}", _NAME_LENGTH, placeholder="").replace(" ", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """The tasks of one suite."""

    suite: str
    tasks: int
    pooled: SuccessRow
    mean_task_success: float
    """Mean of its tasks' success rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessTable:
    """The results of an evaluation. Producer: :func:`success_table`. Consumer: ``report.py`` and the metrics."""

    tasks: tuple[SuccessRow, ...]
    """By task id."""
    overall: SuccessRow
    """All episodes pooled: a task with more episodes weighs more."""
    mean_task_success: float
    """Mean of the tasks' success rates: every task weighs the same."""
    suites: tuple[SuiteRow, ...] = ()
    """In the order of their tasks; empty where all tasks are of one suite."""


def _row(task_id: int | None, instruction: str, records: Sequence[EpisodeRecord]) -> SuccessRow:
    successful = [record.episode_length for record in records if record.success]
    count = len(records)
    return SuccessRow(
        task_id=task_id,
        instruction=instruction,
        episodes=count,
        successes=len(successful),
        interval=wilson_interval(len(successful), count),
        mean_length=sum(record.episode_length for record in records) / count,
        mean_success_length=sum(successful) / len(successful) if successful else None,
        # fsum is correctly rounded, so the order in which workers finish cannot change the last digit.
        mean_return=math.fsum(record.episode_return for record in records) / count,
        failures=sum(record.failed for record in records),
    )


def success_table(records: Iterable[EpisodeRecord]) -> SuccessTable:
    """Group episodes by task. The result depends on the set of episodes only, not on their order.

    Where a task's episodes have different instructions (paraphrases), the row shows that of the lowest initial state.

    Raises:
        ValueError: no records.
    """
    by_task: dict[int, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task_id].append(record)
    if not by_task:
        raise ValueError("no episode was finished, so there is no success rate: run at least one episode per task")
    rows = {
        task_id: _row(task_id, min((r.reset_state_id, r.instruction) for r in by_task[task_id])[1], by_task[task_id])
        for task_id in sorted(by_task)
    }
    suites: dict[str, list[int]] = defaultdict(list)
    for task_id in rows:
        suites[by_task[task_id][0].suite].append(task_id)
    return SuccessTable(
        tasks=tuple(rows.values()),
        overall=_row(None, "all tasks", [record for group in by_task.values() for record in group]),
        mean_task_success=_mean_rate(rows.values()),
        suites=tuple(
            SuiteRow(
                suite=name,
                tasks=len(task_ids),
                pooled=_row(None, name, [record for task_id in task_ids for record in by_task[task_id]]),
                mean_task_success=_mean_rate([rows[task_id] for task_id in task_ids]),
            )
            for name, task_ids in suites.items()
        )
        if len(suites) > 1
        else (),
    )


def _mean_rate(rows: Collection[SuccessRow]) -> float:
    return math.fsum(row.success_rate for row in rows) / len(rows)


class SuccessReport:
    """Rich renderable: ``console.print(SuccessReport(table, title="libero_spatial"))``.

    Instructions wrap, so nothing that tells two tasks apart is cut off. Failures have a column where there are some. A
    narrow console (under 100 columns) leaves out the return and the length of successful episodes; a wide one (from
    120) draws each interval on a scale to 100 %.

    Args:
        sampled: of the same tasks, with actions drawn as in training: a column of its own.
    """

    def __init__(self, table: SuccessTable, *, title: str = "evaluation", sampled: SuccessTable | None = None) -> None:
        self.table, self.title, self.sampled = table, title, sampled

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tasks = self.table.tasks
        grid = Table(title=self.title, title_style="bold", box=box.SIMPLE_HEAD, show_footer=True)
        grid.pad_edge, grid.collapse_padding = False, True
        footer = Text(f"{len(tasks)} task{'' if len(tasks) == 1 else 's'} (mean {self.table.mean_task_success:.1%})")
        grid.add_column("task", Text("all"), justify="right")
        grid.add_column("instruction", footer, ratio=1)
        failures = self.table.overall.failures > 0
        drawn = self.sampled.tasks if self.sampled else [None] * len(tasks)
        rows = [_cells(row, options.max_width, failures, also) for row, also in zip(tasks, drawn, strict=True)]
        overall = self.sampled.overall if self.sampled else None
        for name, total in _cells(self.table.overall, options.max_width, failures, overall).items():
            grid.add_column(name, total, justify="left" if name == _CHART_AXIS else "right", no_wrap=True)
        for row, cells in zip(tasks, rows, strict=True):
            grid.add_row(str(row.task_id), Text(row.instruction), *cells.values())
        yield grid
        if self.table.suites:
            yield self._by_suite(options.max_width)

    def _by_suite(self, width: int) -> Table:
        grid = Table(title="by suite", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        grid.add_column("suite", ratio=1, overflow="fold")
        for name in ("tasks", "mean"):
            grid.add_column(name, justify="right")
        rows = [(row, _cells(row.pooled, width, self.table.overall.failures > 0)) for row in self.table.suites]
        for name in rows[0][1]:
            grid.add_column(name, justify="left" if name == _CHART_AXIS else "right", no_wrap=True)
        for row, cells in rows:
            grid.add_row(Text(row.suite), str(row.tasks), f"{row.mean_task_success:.1%}", *cells.values())
        return grid


def percentages(interval: tuple[float, float]) -> str:
    """An interval in [0, 1] for people."""
    low, high = interval
    return f"{100 * low:.1f} - {100 * high:.1f}"


def _cells(row: SuccessRow, width: int, failures: bool, sampled: SuccessRow | None = None) -> dict[str, Text]:
    """Column name -> cell, for a console of ``width`` columns."""
    cells = {
        "success": Text(f"{row.successes}/{row.episodes}"),
        "rate": Text(f"{row.success_rate:.1%}", style="bold"),
        "95 % interval": Text(percentages(row.interval)),
        **({"sampled": Text(f"{sampled.success_rate:.1%}")} if sampled else {}),
        **({"failed": Text(str(row.failures))} if failures else {}),
        "steps": Text(f"{row.mean_length:.0f}"),
    }
    if width >= _DETAILS_MIN_WIDTH:
        to_success = "-" if row.mean_success_length is None else f"{row.mean_success_length:.0f}"
        cells |= {"to success": Text(to_success), "return": Text(f"{row.mean_return:.2f}")}
    if width >= _CHART_MIN_WIDTH:
        cells[_CHART_AXIS] = _interval_chart(row)
    return cells


def _interval_chart(row: SuccessRow) -> Text:
    """The interval as a line and the rate as a dot, on a scale from 0 to 1."""
    shares = (row.interval[0], row.success_rate, row.interval[1])
    low, dot, high = (round(share * (_CHART_CELLS - 1)) for share in shares)
    text = Text("".join("─" if low <= cell <= high else " " for cell in range(_CHART_CELLS)), style="cyan")
    return Text.assemble(text[:dot], ("●", "bold cyan"), text[dot + 1 :])
