"""How far a run is and how long it still takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import rich
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.progress import Task as RichTask
from rich.text import Text

_ETA_WINDOW = 20
"""The estimate follows the pace of the last so many advances: RL steps get slower and faster as episodes do."""


@dataclass(slots=True)
class _Phase:
    """Work between two steps, counted by itself."""

    what: str
    start: float
    """Clock when the first report of ``what`` could be on its way."""
    done: int = 0
    total: int = 0

    def left(self, now: float) -> float | None:
        """Seconds at the pace so far; None before anything is done."""
        return (now - self.start) * (self.total - self.done) / self.done if self.done else None


class Progress:
    """A progress bar over RL steps (or episodes), with a second one for the work within a step.

    ::

        with Progress(total_steps=100, initial_step=20) as progress:
            for _ in range(20, 100):
                with progress.inner("rollout", total=40) as advance:
                    for _ in range(40):
                        advance()
                progress.describe("update")
                progress.advance()

    On a terminal it is a live bar under what the same console prints. Elsewhere (a log file) it is a plain line now and
    then, without control characters.

    Args:
        total_steps: 0 for a run that is a single :meth:`phase`.
        unit: what is counted, for the label.
        console: default is the one that the metrics table uses too.
        line_interval: seconds between plain lines.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        *,
        unit: str = "step",
        console: Console | None = None,
        line_interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.step, self.unit = total_steps, initial_step, unit
        self._console = console or rich.get_console()
        self._line_interval, self._clock = line_interval, clock
        self._text = ""
        self._inner: tuple[str, int, int] | None = None
        self._phase: _Phase | None = None
        self._over = False
        """There has been a phase; where that is the run, all is done."""
        self._start = self._last_line = clock()
        self._times: deque[tuple[float, int]] = deque([(self._start, initial_step)], maxlen=_ETA_WINDOW + 1)
        self._bar: RichProgress | None = None
        self._printed: list[str] = []

    def __enter__(self) -> Progress:
        self._start = self._last_line = self._clock()
        self._times.clear()
        self._times.append((self._start, self.step))
        if self._console.is_interactive:
            self._bar = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                _EtaColumn(self),
                console=self._console,
            )
            self._outer_id = self._bar.add_task(self._label(), total=self.total, completed=self.step, eta=True)
            try:
                self._bar.start()
            except BaseException:  # Ctrl-C may come within it; nobody else would give the cursor and stderr back
                self._bar.stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        else:
            self._print_line()

    def advance(self, count: int = 1) -> None:
        """``count`` more steps are done."""
        self.step += count
        self._times.append((self._clock(), self.step))
        self._show()

    def describe(self, text: str) -> None:
        """What is being done now, for example ``update``."""
        self._text = text
        self._show()

    def report(self, what: str, done: int, total: int) -> None:
        """How far a worker is with ``what``."""
        phase = self._phase
        if phase is None:
            self.describe(f"{what} {done}/{total}")
            return
        if what != phase.what:
            phase = self._phase = _Phase(what, phase.start if not phase.total else self._clock())
        phase.done, phase.total = done, total
        self._show()

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Work that is no step, such as an evaluation: until it is over, :meth:`report` says how far it is, and the
        time left is its own beside that of the steps to come."""
        self._phase = _Phase(what, self._clock())
        self._show()
        try:
            yield
            if self._phase.total:
                self.report(self._phase.what, self._phase.total, self._phase.total)
        finally:
            self._text = self._phase_text()
            self._phase, self._over = None, True
            self._show()

    @contextmanager
    def inner(self, text: str, total: int) -> Iterator[Callable[..., None]]:
        """A bar within the step, over chunks or episodes. Gives ``advance(count=1)``."""
        self._inner = (text, 0, total)
        bar, inner_id = self._bar, None
        if bar is not None:
            inner_id = bar.add_task(f"  {text}", total=total, eta=False)

        def advance(count: int = 1) -> None:
            if self._inner is not None:
                self._inner = (text, self._inner[1] + count, total)
            if bar is not None and inner_id is not None:
                bar.advance(inner_id, count)
            self._show()

        try:
            yield advance
        finally:
            self._inner = None
            if bar is not None and inner_id is not None:
                bar.remove_task(inner_id)

    @property
    def eta(self) -> float | None:
        """Seconds still to go at the recent pace; None before the first step is done, or the first part of a phase."""
        if self._phase is not None:
            phase, steps = self._phase.left(self._clock()), self._steps_left()
            return None if phase is None or steps is None else phase + steps
        if not self.total:
            return 0.0 if self._over else None
        steps = self._steps_left()
        return None if steps is None else max(steps - (self._clock() - self._times[-1][0]), 0.0)

    def _steps_left(self) -> float | None:
        """Seconds that the steps to come take, counted from the end of the last one."""
        if self.step == self.total:
            return 0.0
        first_time, first_step = self._times[0]
        last_time, last_step = self._times[-1]
        if last_step == first_step:
            return None
        return (self.total - self.step) * (last_time - first_time) / (last_step - first_step)

    def _phase_text(self) -> str:
        assert self._phase is not None
        counted = f" {self._phase.done}/{self._phase.total}" if self._phase.total else ""
        return f"{self._phase.what}{counted}"

    def _label(self) -> str:
        return f"{self.unit if self.total else ''} {self._text}".strip()

    def _show(self) -> None:
        if self._bar is not None:
            phase = self._phase
            if phase is None:
                self._bar.update(self._outer_id, total=self.total, completed=self.step, description=self._label())
            else:
                steps = f"{self.unit} {self.step}/{self.total}, " if self.total else ""
                self._bar.update(
                    self._outer_id,
                    total=phase.total or None,
                    completed=phase.done,
                    description=f"{steps}{phase.what}",
                )
        elif self._clock() - self._last_line >= self._line_interval:
            self._print_line()

    def _print_line(self) -> None:
        now = self._last_line = self._clock()
        parts = [f"{self.unit} {self.step}/{self.total} ({self.step / self.total:.0%})"] if self.total else []
        if self._phase is not None:
            parts.append(self._phase_text())
        elif self._inner is not None:
            parts.append("{} {}/{}".format(*self._inner))
        elif self._text:
            parts.append(self._text)
        if parts == self._printed:
            return
        self._printed = parts.copy()
        parts += [f"elapsed {format_duration(now - self._start)}", f"left {format_duration(self.eta)}"]
        self._console.print(", ".join(parts), markup=False, highlight=False, soft_wrap=True)


class _EtaColumn(ProgressColumn):
    """Time left of the outer bar. Rich's own estimate forgets steps that take longer than half a minute."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: RichTask) -> Text:
        if not task.fields["eta"]:
            return Text()
        elapsed = format_duration(task.elapsed)
        return Text(f"{elapsed} elapsed, {format_duration(self._progress.eta)} left", style="progress.remaining")


def format_duration(seconds: float | None) -> str:
    """``1:02:03`` (hours, minutes, seconds), or ``-:--:--`` when unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
