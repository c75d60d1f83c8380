"""Progress of a run: how far it is, what its workers do, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import rich
from rich.console import Console

from embodied_rl.monitoring.live import LiveDisplay, format_duration
from embodied_rl.monitoring.trend import Trend
from embodied_rl.runtime.worker import WorkerProgress

_ETA_WINDOW = 20
"""The estimate follows the pace of the last so many advances: RL steps get slower and faster as episodes do."""


@dataclass(slots=True)
class _Work:
    """Work that several workers share and report on."""

    what: str
    start: float
    """Clock when the first report could be on its way."""
    reports: dict[str, WorkerProgress] = field(default_factory=dict)
    """By worker."""

    @property
    def done(self) -> int:
        return sum(report.done for report in self.reports.values())

    @property
    def total(self) -> int:
        return sum(report.total for report in self.reports.values())

    @property
    def fraction(self) -> float:
        """Share that the worker has done which is farthest behind."""
        shares = (r.done / r.total if r.fraction is None else r.fraction for r in self.reports.values() if r.total)
        return min(shares, default=0.0)

    def __str__(self) -> str:
        return f"{self.what} {self.done}/{self.total}" if self.total else self.what

    def finish(self) -> None:
        """Count everything as done."""
        self.reports = {
            worker: WorkerProgress(worker=worker, what=report.what, done=report.total, total=report.total)
            for worker, report in self.reports.items()
        }

    def left(self, now: float) -> float | None:
        """Seconds at the pace so far; None before anything is done."""
        share = self.fraction
        return (now - self.start) * (1 - share) / share if share else None


class Progress:
    """Counts RL steps, and phases between them, and shows how far they are.

    ::

        with Progress(total_steps=100, initial_step=20) as progress:
            ...  # workers start
            progress.begin_steps(evaluations_after=lambda step: step < 100)
            for _ in range(20, 100):
                progress.describe("update")
                progress.show(metrics)
                progress.advance()
            with progress.phase("evaluation"):
                progress.report("evaluation", 3, 8)

    On a terminal a few live lines stand under what the same console prints. Elsewhere (a log file) it is a plain line
    now and then, without control characters.

    Args:
        total_steps: 0 for a run that is a single :meth:`phase`.
        console: default is the one that the metrics table uses too.
        log: takes the plain lines where the console has live ones.
        line_interval: seconds between plain lines.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        *,
        console: Console | None = None,
        log: Console | None = None,
        line_interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.step = total_steps, initial_step
        self.workers: dict[str, WorkerProgress] = {}
        """What each does, by name."""
        self.trend = Trend()
        self.restarts = self.recoveries = 0
        """Env workers replaced since the workers were started; how often these were started again."""
        self._console = console or rich.get_console()
        self._log, self._line_interval, self._clock = log, line_interval, clock
        self._text = ""
        self._work: _Work | None = None
        """What was reported last."""
        self._phase: str | None = None
        self._over = False
        """There has been a phase; where that is the run, all is done."""
        self._evaluations_after: Callable[[int], int] = lambda step: 0
        self._evaluation_s: float | None = None
        """Seconds of the last evaluation, or as long as there was none what it is expected to take."""
        self._evaluated = False
        self._live: LiveDisplay | None = None
        self._printed: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._start = self._last_line = self._clock()
        self._times = deque([(self._start, self.step)], maxlen=_ETA_WINDOW + 1)

    def __enter__(self) -> Progress:
        self._begin()
        if self._console.is_interactive:
            self._live = LiveDisplay(self, self._console)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        at = f"step {self.step}/{self.total}" if self.total else str(self._work or self._phase or self._text)
        word = "stopped at " if kind else "finished: "
        self._say(f"{word}{at}, elapsed {format_duration(self.elapsed)}")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

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
        if self._phase is None:
            self._work = None
        self._show()

    def show(self, metrics: Mapping[str, float]) -> None:
        """Let a step's metrics stand in the display until the next step's come."""
        self.trend.add(metrics)

    def hear(self, progress: WorkerProgress) -> None:
        """Note what a worker does."""
        self.workers[progress.worker] = progress
        if progress.what and progress.total:
            self._note(progress)

    def report(self, what: str, done: int, total: int) -> None:
        """Note how far ``what`` is, where no worker says it."""
        self._note(WorkerProgress(worker="", what=what, done=done, total=total))

    def _note(self, progress: WorkerProgress) -> None:
        work = self._work
        if work is None or work.what != progress.what:
            begun = work.start if work is not None and not work.reports else self._clock()
            work = self._work = _Work(progress.what or "", begun)
        work.reports[progress.worker] = progress
        self._show()

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Count work that is no step, an evaluation: until it is over, reports say how far it is, and the time left is
        its own beside that of the steps and evaluations to come. It does not count for the steps' pace."""
        start = self._clock()
        self._phase, self._work, self._text = what, _Work(what, start), ""
        self._show()
        try:
            yield
            self._work.finish()
            self._show()
        finally:
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
            phase = self._work.left(now) if self._work else None
            return None if phase is None or steps is None else phase + steps + evaluations
        if not self.total:
            return 0.0 if self._over else None
        return None if steps is None else max(steps - (now - self._times[-1][0]), 0.0) + evaluations

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, at the recent pace; None before the first one is done."""
        (first_time, first_step), (last_time, last_step) = self._times[0], self._times[-1]
        return None if last_step == first_step else (last_time - first_time) / (last_step - first_step)

    def _steps_left(self) -> float | None:
        """Seconds that the steps to come take, counted from the end of the last one."""
        if self.step >= self.total:
            return 0.0
        pace = self.step_seconds
        return None if pace is None else (self.total - self.step) * pace

    @property
    def current(self) -> str:
        """The work under way."""
        work = "" if self._work is None else str(self._work)
        if self._phase is not None and self._work is not None and self._work.what != self._phase:
            work = f"{self._phase}: {work}"
        extra = self._text if self._phase or self._work is None else ""
        return ", ".join(filter(None, (work, extra)))

    @property
    def fraction(self) -> float | None:
        """Share of the phase, or of the steps, that is done; None: nobody knows."""
        if self._phase is not None or not self.total:
            return self._work.fraction if self._work and self._work.total else None
        return self.step / self.total

    def _show(self) -> None:
        """Print a line if one is due. A live display looks by itself."""
        now = self._clock()
        if now - self._last_line < self._line_interval:
            return
        self._last_line = now
        steps = f"step {self.step}/{self.total} ({self.step / self.total:.0%})" if self.total else ""
        parts = list(filter(None, (steps, self.current)))
        if parts != self._printed:
            self._printed = parts.copy()
            self._say(
                ", ".join((*parts, f"elapsed {format_duration(self.elapsed)}", f"left {format_duration(self.eta)}"))
            )

    def _say(self, line: str) -> None:
        console = self._console if self._live is None else self._log
        if console is not None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
