"""The run's console: what it prints goes to ``run.log``, too; and the metric backends that print."""

from __future__ import annotations

import errno
import io
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Final, cast

from rich import box
from rich.console import Console
from rich.control import Control
from rich.panel import Panel
from rich.text import Text

from embodied_rl.errors import UserError, listed
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.trend import TREND, Column, Trend, columns_of, sparkline

LOG_FILE: Final = "run.log"
_LOG_WIDTH: Final = 160
_COLUMN_WIDTH: Final = 38
_VALUE_WIDTH: Final = 10
_GAP: Final = 2
"""Spaces between columns."""
_NOT_FINITE: Final = {"nan", "inf", "-inf"}
_NO_PREFIX: Final = "run"
"""Heading of metrics without a prefix."""
_TASKS: Final = ("eval_task/", "eval_suite/", "env_task/")
"""Prefixes with as many rows as there are tasks or suites; an evaluation's table has them."""


class _LogFile(io.TextIOBase):
    """Text that is in the file at once, or lost where the disk is full: the run's own error says so, or none."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._raw.write(text.encode())
        return len(text)


class RunConsole(Console):
    """A console whose output a file keeps, too: from the beginning, once the run has a directory."""

    def __init__(self, **options: Any) -> None:
        if Console().is_jupyter:  # its stream says it is a terminal, and a cell keeps what a cursor would overwrite
            options = {"force_terminal": False} | options
        super().__init__(force_jupyter=False, **options)
        self._on_terminal = self.is_terminal
        """At the start: one that was closed is none any more."""
        self._early: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.log_only: Console | None = None
        """Prints to the file alone; None: there is none yet, or none any more."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if objects and all(isinstance(part, Control) for part in objects):  # the live lines move the cursor
            return
        if self.log_only is None:
            self._early.append((objects, options))
        else:
            self.log_only.print(*objects, **options)

    def _check_buffer(self) -> None:
        """As rich's, which writes what was printed. To a terminal that was closed nothing can be written, a moment
        before SIGHUP says so and the run ends with a checkpoint."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO or not self._on_terminal:
                raise
            del self._buffer[:]

    @contextmanager
    def logging_to(self, path: Path) -> Iterator[None]:
        """Keep what is printed in a file, after what was there; and at the end why it ended, if that was an error."""
        with path.open("ab", buffering=0) as raw:
            self.log_only = Console(
                file=cast(IO[str], _LogFile(raw)),
                width=_LOG_WIDTH,
                force_terminal=False,
                force_jupyter=False,
                color_system=None,
            )
            for objects, options in self._early:
                self.log_only.print(*objects, **options)
            self._early.clear()
            try:
                yield
            except BaseException as error:
                text = f"error: {error}" if isinstance(error, UserError) else traceback.format_exc()
                self.log_only.print(text, markup=False, highlight=False, soft_wrap=True)
                raise
            finally:
                self.log_only = None


class ConsoleBackend:
    """Metrics on the console: a row a step, with what matters of it and the trend of success over the last steps.

    Columns that do not fit are left out, ``metrics.jsonl`` has them all. A metric that is not finite is named.
    """

    def __init__(self, run: RunInfo) -> None:
        self._console = run.console
        self._columns: list[Column] = []
        self._trend = Trend()
        self._interrupted = False
        """Something else was printed under the heading."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step" not in metrics:  # of an evaluation, which prints a table of its own
            self._interrupted = True
            return
        if not self._columns or self._interrupted:
            self._columns = self._fitting(metrics)
            heading = [f"{'step':>6}", *(f"{column.heading:>{column.width}}" for column in self._columns), "  trend"]
            self._console.print(Text("  ".join(heading).rstrip(), style="bold cyan"), soft_wrap=True)
            self._interrupted = False
        self._trend.add(metrics)
        cells = [f"{step:>6}", *(f"{column.cell(metrics):>{column.width}}" for column in self._columns)]
        row = Text("  ".join([*cells, f"  {sparkline(tuple(self._trend.values))}"]).rstrip())
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            row.append(f"  not finite: {listed(wrong, 3)}", style="bold white on red")
        self._console.print(row, soft_wrap=True)

    def _fitting(self, metrics: Mapping[str, float]) -> list[Column]:
        wanted = columns_of(metrics)
        chosen, width = [], 6 + 4 + TREND
        for column in wanted:
            width += column.width + 2
            if width > self._console.width:
                break
            chosen.append(column)
        return chosen or list(wanted[:1])

    def close(self) -> None:
        pass


class VerboseBackend:
    """Metrics on the console: one panel a step with all of them, grouped by prefix, in as many columns as fit."""

    def __init__(self, run: RunInfo) -> None:
        self._console = run.console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if not name.startswith(_TASKS)}
        if shown:
            self._console.print(metrics_panel(step, shown, self._console.width))

    def close(self) -> None:
        pass


class LogBackend(VerboseBackend):
    """The same panel, in ``run.log`` alone."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self._console = getattr(run.console, "log_only", None) or Console(quiet=True, force_jupyter=False)


def metrics_panel(step: int, metrics: Mapping[str, float], width: int) -> Panel:
    """Groups (the part of a name before its first ``/``) in alphabetical order, balanced over the columns."""
    groups: dict[str, dict[str, float]] = {}
    for name in sorted(metrics):
        prefix, _, rest = name.partition("/")
        groups.setdefault(prefix if rest else _NO_PREFIX, {})[rest or name] = metrics[name]
    count = max(min((width - 4) // _COLUMN_WIDTH, len(groups)), 1)
    columns: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    for prefix, values in groups.items():
        shortest = min(columns, key=len)
        shortest += [(prefix, ""), *((f" {name}", format_number(value)) for name, value in values.items())]
    room = (width - 4 - _GAP * (count - 1)) // count - _VALUE_WIDTH
    lines = Text(no_wrap=True)  # a table of tables is ten times slower, in every step
    for row in zip_longest(*columns, fillvalue=("", "")):
        for number, (name, value) in enumerate(row):
            lines.append(" " * (_GAP if number else 0))
            left = room + _VALUE_WIDTH - max(len(value), _VALUE_WIDTH)
            shown = name if len(name) < left else f"{name[: left - 2]}… "
            lines.append(f"{shown:<{left}}", None if value else "bold cyan")
            lines.append(f"{value:>{_VALUE_WIDTH}}", "bold white on red" if value in _NOT_FINITE else None)
        lines.append("\n")
    lines.rstrip()
    title = Text(f"step {step}", style="bold")
    return Panel(lines, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def format_number(value: float) -> str:
    """Whole numbers in full, others with four significant digits, very large and small ones with an exponent."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size < 1e-3 or size >= 1e9:
        return f"{value:.3e}"
    if size >= 1000:
        return f"{value:,.1f}"
    return f"{value:#.4g}".rstrip(".")
