"""The live lines of a run's progress on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from embodied_rl.monitoring.trend import Trend
from embodied_rl.runtime.worker import WorkerProgress


class Shown(Protocol):
    """What the display reads, each time that it draws."""

    step: int
    total: int
    workers: dict[str, WorkerProgress]
    trend: Trend

    @property
    def current(self) -> str: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def elapsed(self) -> float: ...
    @property
    def eta(self) -> float | None: ...


class LiveDisplay:
    """Three lines, which go when the display ends: how far the run is, what the last step reached, and what each group
    of workers does."""

    def __init__(self, shown: Shown, console: Console) -> None:
        self._shown = shown
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.lines, console=console, refresh_per_second=4, transient=True)

    def start(self) -> None:
        try:
            self._live.start()
        except BaseException:  # Ctrl-C may come within it; nobody else would give the cursor and stderr back
            self._live.stop()
            raise

    def stop(self) -> None:
        self._live.stop()

    def lines(self) -> Group:
        """What stands there now."""
        shown = self._shown
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(width=1)
        bar.add_column(no_wrap=True, overflow="ellipsis", max_width=40)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        steps = f"step {shown.step}/{shown.total}" if shown.total else ""
        label = ", ".join(filter(None, (steps, shown.current)))
        share = shown.fraction
        bar.add_row(
            self._spinner,
            Text(label),
            ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, pulse=share is None),
            Text(f"{format_duration(shown.elapsed)}, {format_duration(shown.eta)} left", style="progress.remaining"),
        )
        more = (str(shown.trend), " · ".join(_states(shown.workers)))
        return Group(bar, *(Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in more if line))


def _states(workers: Mapping[str, WorkerProgress]) -> Iterator[str]:
    """For each group what its workers do, the ones farthest behind first: ``2 env: rollout 3/8``."""
    groups: dict[str, list[WorkerProgress]] = {}
    for name, progress in workers.items():
        groups.setdefault(name.partition("[")[0].removesuffix("Group").lower(), []).append(progress)
    for group, members in groups.items():
        busy = [member for member in members if member.what]
        count = f"{len(members)} {group}" if len(members) > 1 else group
        if not busy:
            yield f"{count}: idle"
            continue
        behind = min(busy, key=lambda member: member.done / member.total if member.total else 0.0)
        text = f"{behind.what} {behind.done}/{behind.total}" if behind.total else behind.what
        idle = f" ({len(members) - len(busy)} idle)" if len(busy) < len(members) else ""
        yield f"{count}: {text}{idle}"


def format_duration(seconds: float | None) -> str:
    """``1:02:03`` (hours, minutes, seconds), or ``-:--:--`` when unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
