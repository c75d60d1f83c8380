"""A trace of some training steps: what each process of the run did when, on one clock, as Perfetto shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from embodied_rl.runtime.worker import ReportProgress

DRIVER: Final = "driver"
CALLS: Final = 0
"""Row of a process that shows its calls and, within them, their phases."""
REPORTS: Final = 1
"""Row of what it reported between them: micro-batches, chunks."""
_ROWS: Final = {CALLS: "calls and phases", REPORTS: "reports"}
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
    """Spans of one worker, or of the driver. Its clock, ``perf_counter``, is one for all processes of a machine; those
    of several machines are brought together by the time of day.

    A call that names its training step turns it on or off; calls that do not, such as a weight sync, follow the last.
    """

    def __init__(self, name: str, plan: TracePlan | None = None) -> None:
        self._name, self._plan = name, plan
        self._on = self._started = False
        self._entries: list[dict[str, Any]] = []
        """Spans, and first of all what the clock showed at which time."""
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

    def reported(self, what: str, done: int, total: int) -> None:
        """The worker has reported progress: it did this since its last report."""
        if self._on:
            now = perf_counter()
            self._add(f"{what} {done}/{total}", self._reported, now, REPORTS)
            self._reported = now

    def reporting(self, report: ReportProgress) -> ReportProgress:
        """``report``, and :meth:`reported` before it."""
        if self._plan is None:
            return report

        def both(what: str, done: int, total: int, fraction: float | None = None) -> None:
            self.reported(what, done, total)
            report(what, done, total, fraction)

        return both

    def _add(self, name: str, start: float, end: float, row: int, **more: Any) -> None:
        if not self._started:
            self._started = True
            self._entries.append({"machine": _machine(), "clock": perf_counter(), "time": time()})
        self._entries.append({"name": name, "start": start, "end": end, "row": row, "args": more})

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{self._name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self._entries)
        self._entries.clear()


def merge(plan: TracePlan) -> None:
    """Make one file of what the workers wrote, in Chrome's trace format (``ui.perfetto.dev``, ``chrome://tracing``).

    A viewer drops a span that is neither within another of its row nor behind it, so times are whole microseconds,
    which none rounds, and an outer span comes first. For Perfetto a row's number belongs to no other row of any
    process, the main row's is its process', and none is 0.
    """
    spans: dict[str, list[dict[str, Any]]] = {}
    offsets: dict[str, float] = {}
    for path in sorted(plan.folder.glob("*.jsonl"), key=_driver_first):
        found, offset = spans.setdefault(path.stem, []), 0.0
        for entry in map(json.loads, path.open(encoding="utf-8")):
            if "machine" in entry:
                offset = offsets.setdefault(entry["machine"], entry["time"] - entry["clock"])  # one for a machine
            else:
                found.append(entry | {key: entry[key] + offset for key in ("start", "end")})
    begin = min((span["start"] for found in spans.values() for span in found), default=0.0)
    events: list[dict[str, Any]] = []
    for index, (name, found) in enumerate(spans.items()):
        pid = 1 + index * len(_ROWS)
        events.append(_title("process_name", pid, pid, name=name))
        events.append(_title("process_sort_index", pid, pid, sort_index=index))
        events += [_title("thread_name", pid, pid + row, name=_ROWS[row]) for row in {span["row"] for span in found}]
        rows = [_event(span, begin, pid) for span in reversed(found)]  # they were written when they ended
        events += sorted(rows, key=lambda event: (event["ts"], -event["dur"]))
    if events:
        plan.file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _title(what: str, pid: int, tid: int, **value: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": value}


def _event(span: Mapping[str, Any], begin: float, pid: int) -> dict[str, Any]:
    start, end = (int(1e6 * (span[key] - begin)) for key in ("start", "end"))
    event = {"name": span["name"], "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": pid + span["row"]}
    return event | ({"args": span["args"]} if span["args"] else {})


def _driver_first(path: Path) -> tuple[bool, str]:
    return path.stem != DRIVER, path.stem


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _machine() -> str:
    """Of all processes that share its clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
