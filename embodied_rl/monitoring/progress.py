"""Progress of a run, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

    def __str__(self) -> str:
        return f"{self.what} {self.done}/{self.total}" if self.total else self.what

    def left(self, now: float) -> float | None:
        """Seconds at the pace so far; None before anything is done."""
        return (now - self.start) * (self.total - self.done) / self.done if self.done else None


class Progress:
    """A progress bar over RL steps (or episodes), and over phases between them.

    ::

        with Progress(total_steps=100, initial_step=20) as progress:
            ...  # workers start
            progress.begin_steps(evaluations_after=lambda step: step < 100)
            for _ in range(20, 100):
                progress.describe("update")
                progress.advance()
            with progress.phase("evaluation"):
                progress.report("evaluation chunk", 3, 8)

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
        self._phase: _Phase | None = None
        self._over = False
        """There has been a phase; where that is the run, all is done."""
        self._evaluations_after: Callable[[int], int] = lambda step: 0
        self._evaluation_s: float | None = None
        """Seconds of the last evaluation, or as long as there was none what it is expected to take."""
        self._evaluated = False
        self._bar: RichProgress | None = None
        self._printed: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._start = self._last_line = self._clock()
        self._times = deque([(self._start, self.step)], maxlen=_ETA_WINDOW + 1)

    def __enter__(self) -> Progress:
        self._begin()
        if self._console.is_interactive:
            self._bar = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                _EtaColumn(self),
                console=self._console,
            )
            self._task = self._bar.add_task("")
            self._show()
            try:
                self._bar.start()
            except BaseException:  # Ctrl-C may come within it; nobody else would give the cursor and stderr back
                self._bar.stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        else:
            self._print_line()

    def begin_steps(self, evaluations_after: Callable[[int], int] = lambda step: 0) -> None:
        """Start the steps' clock: the time before, in which workers start, tells nothing of their pace.

        Args:
            evaluations_after: finished steps -> number of evaluations after later steps.
        """
        self._evaluations_after = evaluations_after
        self._times = deque([(self._clock(), self.step)], maxlen=_ETA_WINDOW + 1)

    def expect_evaluation(self, seconds: float) -> None:
        """An estimate of an evaluation's time, which counts until one has been timed."""
        if not self._evaluated:
            self._evaluation_s = seconds

    def advance(self, count: int = 1) -> None:
        """``count`` more steps are done."""
        self.step += count
        self._times.append((self._clock(), self.step))
        self._show()

    def describe(self, text: str) -> None:
        """Name the work under way, for example ``update``; or, in a phase, add to its name."""
        self._text = text
        self._show()

    def report(self, what: str, done: int, total: int) -> None:
        """Note how far a worker is with ``what``."""
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
        """Count work that is no step, an evaluation: until it is over, :meth:`report` says how far it is, and the time
        left is its own beside that of the steps and evaluations to come. It does not count for the steps' pace."""
        start = self._clock()
        self._phase, self._text = _Phase(what, start), ""
        self._show()
        try:
            yield
            if self._phase.total:
                self.report(self._phase.what, self._phase.total, self._phase.total)
        finally:
            self._text = self._current()
            self._phase, self._over = None, True
            self._evaluation_s, self._evaluated = self._clock() - start, True
            self._times = deque(((at + self._evaluation_s, step) for at, step in self._times), maxlen=_ETA_WINDOW + 1)
            self._show()

    @property
    def eta(self) -> float | None:
        """Seconds still to go at the recent pace; None before the first step is done, or the first part of a phase."""
        now, steps = self._clock(), self._steps_left()
        evaluations = self._evaluations_after(self.step) * (self._evaluation_s or 0.0)
        if self._phase is not None:
            phase = self._phase.left(now)
            return None if phase is None or steps is None else phase + steps + evaluations
        if not self.total:
            return 0.0 if self._over else None
        return None if steps is None else max(steps - (now - self._times[-1][0]), 0.0) + evaluations

    def _steps_left(self) -> float | None:
        """Seconds that the steps to come take, counted from the end of the last one."""
        if self.step >= self.total:
            return 0.0
        (first_time, first_step), (last_time, last_step) = self._times[0], self._times[-1]
        if last_step == first_step:
            return None
        return (self.total - self.step) * (last_time - first_time) / (last_step - first_step)

    def _current(self) -> str:
        """The phase and the text."""
        return ", ".join(filter(None, (str(self._phase or ""), self._text)))

    def _show(self) -> None:
        phase = self._phase
        if self._bar is not None and phase is None:
            label = f"{self.unit if self.total else ''} {self._text}".strip()
            self._bar.update(self._task, total=self.total, completed=self.step, description=label)
        elif self._bar is not None and phase is not None:
            steps = f"{self.unit} {self.step}/{self.total}" if self.total else ""
            label = ", ".join(filter(None, (steps, phase.what, self._text)))
            self._bar.update(self._task, total=phase.total or None, completed=phase.done, description=label)
        elif self._clock() - self._last_line >= self._line_interval:
            self._print_line()

    def _print_line(self) -> None:
        now = self._last_line = self._clock()
        steps = f"{self.unit} {self.step}/{self.total} ({self.step / self.total:.0%})" if self.total else ""
        parts = list(filter(None, (steps, self._current())))
        if parts == self._printed:
            return
        self._printed = parts.copy()
        parts += [f"elapsed {format_duration(now - self._start)}", f"left {format_duration(self.eta)}"]
        self._console.print(", ".join(parts), markup=False, highlight=False, soft_wrap=True)


class _EtaColumn(ProgressColumn):
    """Time left. Rich's own estimate forgets steps that take longer than half a minute."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: RichTask) -> Text:
        elapsed = format_duration(task.elapsed)
        return Text(f"{elapsed} elapsed, {format_duration(self._progress.eta)} left", style="progress.remaining")


def format_duration(seconds: float | None) -> str:
    """``1:02:03`` (hours, minutes, seconds), or ``-:--:--`` when unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
