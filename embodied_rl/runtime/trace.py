"""A trace of some training steps: what each process of the run did when, on one clock, as Perfetto shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from embodied_rl.runtime.worker import ReportProgress

DRIVER: Final = "driver"
CALLS: Final = 0
"""Row of a process that shows its calls and, within them, their phases."""
REPORTS: Final = 1
"""Row of what it reported between them: micro-batches, chunks."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """Which training steps are traced, and where the workers write."""

    folder: Path
    steps: frozenset[int]
    """From 1."""

    @property
    def file(self) -> Path:
        """All workers' spans together."""
        return self.folder.with_suffix(".json")


class Trace:
    """Spans of one worker, or of the driver. Its clock, ``perf_counter``, is one for all processes of a machine.

    A call that names its training step turns it on or off; calls that do not, such as a weight sync, follow the last.
    """

    def __init__(self, name: str, plan: TracePlan | None = None) -> None:
        self._name, self._plan = name, plan
        self._on = False
        self._events: list[dict[str, Any]] = []
        self._reported = 0.0

    def merge(self, step: int) -> None:
        """Make the file of all workers when training step number ``step``, from 1, is finished, if it was traced."""
        if self._plan is not None and step in self._plan.steps:
            merge(self._plan)

    @contextmanager
    def call(self, name: str, step: int | None = None) -> Iterator[None]:
        """A call of a worker's method; ``step`` is its training step, from 0. What it did is on disk afterwards."""
        if self._plan is None:
            yield
            return
        if step is not None:
            self._on = step + 1 in self._plan.steps
        on, start, worked = self._on, perf_counter(), process_time()
        self._reported = start
        try:
            yield
        finally:
            if on:
                step_of = {} if step is None else {"step": step + 1}
                facts = {"cpu_ms": _milliseconds(process_time() - worked), "memory_mib": _resident() // 2**20}
                self._add(name, start, perf_counter(), CALLS, **facts, **step_of)
                self._write(self._plan.folder)

    def phase(self, name: str, start: float, end: float, cpu: float) -> None:
        """A part of a call, in which the process' threads worked so many CPU seconds."""
        if self._on:
            self._add(name, start, end, CALLS, cpu_ms=_milliseconds(cpu))

    def reported(self, what: str) -> None:
        """The worker has reported progress: it did this since its last report."""
        if self._on:
            now = perf_counter()
            self._add(what, self._reported, now, REPORTS)
            self._reported = now

    def reporting(self, report: ReportProgress) -> ReportProgress:
        """``report``, and :meth:`reported` before it."""
        if self._plan is None:
            return report

        def both(what: str, done: int, total: int, fraction: float | None = None) -> None:
            self.reported(what)
            report(what, done, total, fraction)

        return both

    def _add(self, name: str, start: float, end: float, row: int, **more: Any) -> None:
        event = {"name": name, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * (end - start), "tid": row}
        self._events.append(event | ({"args": more} if more else {}))

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{self._name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in self._events)
        self._events.clear()


def merge(plan: TracePlan) -> None:
    """Make one file of what the workers wrote, in Chrome's trace format (``ui.perfetto.dev``, ``chrome://tracing``)."""
    files = sorted(plan.folder.glob("*.jsonl"), key=_driver_first)
    spans = {path.stem: [json.loads(line) for line in path.open(encoding="utf-8")] for path in files}
    begin = min((span["ts"] for found in spans.values() for span in found), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (name, found) in enumerate(spans.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for row, title in ((CALLS, "calls and phases"), (REPORTS, "reports")):
            if any(span["tid"] == row for span in found):
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": title}})
        events += [span | {"pid": pid, "ts": span["ts"] - begin} for span in found]
    if events:
        plan.file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _driver_first(path: Path) -> tuple[bool, str]:
    return path.stem != DRIVER, path.stem


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
