"""Metrics on the console: one panel a step, grouped by prefix, in as many columns as fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from embodied_rl.monitoring.backend import RunInfo

_COLUMN_WIDTH = 38
_VALUE_WIDTH = 10
_NO_PREFIX = "run"
"""Heading of metrics without a prefix."""


_TASKS = ("eval_task/", "env_task/")
"""As many rows as there are tasks; an evaluation's table has them."""


class ConsoleBackend:
    def __init__(self, run: RunInfo) -> None:
        self._console = run.console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if not name.startswith(_TASKS)}
        if shown:
            self._console.print(metrics_panel(step, shown, self._console.width))

    def close(self) -> None:
        pass


def metrics_panel(step: int, metrics: Mapping[str, float], width: int) -> Panel:
    """Groups (the part of a name before its first ``/``) in alphabetical order, balanced over the columns."""
    groups: dict[str, dict[str, float]] = {}
    for name in sorted(metrics):
        prefix, _, rest = name.partition("/")
        groups.setdefault(prefix if rest else _NO_PREFIX, {})[rest or name] = metrics[name]
    count = max(min((width - 4) // _COLUMN_WIDTH, len(groups)), 1)
    columns: list[list[Table]] = [[] for _ in range(count)]
    heights = [0] * count
    for prefix, values in groups.items():
        shortest = heights.index(min(heights))
        columns[shortest].append(_group_table(prefix, values))
        heights[shortest] += len(values) + 2
    layout = Table.grid(padding=(0, 2), expand=True)
    for _ in columns:
        layout.add_column(ratio=1)
    layout.add_row(*(Group(*tables) for tables in columns))
    return Panel(
        layout, title=Text(f"step {step}", style="bold"), title_align="left", box=box.ROUNDED, border_style="dim"
    )


def _group_table(prefix: str, values: Mapping[str, float]) -> Table:
    table = Table(box=None, expand=True, padding=0, header_style="bold cyan")
    table.add_column(prefix, ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("", justify="right", no_wrap=True, min_width=_VALUE_WIDTH)
    for name, value in values.items():
        style = "" if math.isfinite(value) else "bold white on red"
        table.add_row(Text(f" {name}"), Text(format_number(value), style=style))
    return table


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
