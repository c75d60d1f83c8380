"""Timing of a worker's phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager


class PhaseTimer:
    """Accumulates wall seconds per phase; an inner phase's time does not count for the outer one.

    ::

        timer = PhaseTimer()
        with timer.phase("update"):
            ...
            with timer.phase("weight_sync"):
                ...
        timer.drain()  # {"update": 1.2, "weight_sync": 0.3}

    For one thread. Two reads of each clock per phase.

    Args:
        ended: told of every phase: name, start and end by the clock, and the CPU seconds of all threads of the process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        ended: Callable[[str, float, float, float], None] = lambda name, start, end, cpu: None,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._ended, self._clock, self._cpu = ended, clock, cpu
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = clock()

    def _credit(self) -> None:
        """Give the time since the last change to the innermost open phase."""
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def begin(self, name: str) -> tuple[float, float]:
        """Open a phase; returns what the two clocks show."""
        self._credit()
        self._open.append(name)
        return self._mark, self._cpu()

    def end(self, name: str, start: float, worked: float) -> None:
        """Close a phase, for which :meth:`begin` gave these."""
        self._credit()
        self._open.pop()
        self._ended(name, start, self._mark, self._cpu() - worked)

    def drain(self) -> dict[str, float]:
        """Seconds per phase since the last drain, up to now for phases still open."""
        self._credit()
        seconds, self._seconds = self._seconds, {}
        return seconds


class _Phase(AbstractContextManager[None]):
    """A class, since there are ten phases a message, and a generator would take three times as long."""

    __slots__ = ("_began", "_name", "_timer")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._began = self._timer.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._timer.end(self._name, *self._began)
