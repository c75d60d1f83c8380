"""Memory of a run's processes, as Linux counts it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from embodied_rl.runtime.process_groups import members

GIB: Final = 2**30
_EVERY_S: Final = 1.0
_VMSTAT: Final = Path("/proc/vmstat")


class MachineMemory(NamedTuple):
    """Bytes of this machine, or of the container that the process is in."""

    total: int
    available: int


def machine_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> MachineMemory:
    """What there is now.

    Args:
        limit: file of cgroup v2: bytes, or max.
    """
    found = psutil.virtual_memory()
    total, available = found.total, found.available
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
        available = min(available, total)
    return MachineMemory(total, available)


class Held(NamedTuple):
    """Bytes that a process, or several, have in memory."""

    resident: int
    shared: int
    """Of those, what other processes may have, too: libraries and the channels' messages."""


def held(pid: int) -> Held:
    """Memory of a process; of one that is gone none."""
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.Error:
        return Held(0, 0)
    return Held(found.rss, getattr(found, "shared", 0))


def held_by_workers(pids: Collection[int]) -> dict[int, Held]:
    """Process id of a worker of this machine -> its memory, with what the processes that it started hold alone (of
    pages that they have from it by forking there is one copy); of one that is gone none."""
    return {
        leader: together([held(leader), *map(_alone, started)]) if held(leader).resident else Held(0, 0)
        for leader, (_, *started) in members(pids).items()
    }


def _alone(pid: int) -> Held:
    """Memory that no other process has."""
    try:
        return Held(psutil.Process(pid).memory_full_info().uss, 0)
    except psutil.Error:
        return Held(0, 0)


def together(processes: Iterable[Held]) -> Held:
    """Of processes of one machine: what they may share is counted once."""
    found = list(processes)
    shared = max((memory.shared for memory in found), default=0)
    return Held(shared + sum(memory.resident - memory.shared for memory in found), shared)


def table(processes: Mapping[str, Held]) -> str:
    """A line for each process, the largest first."""
    largest = sorted(processes.items(), key=lambda item: -item[1].resident)
    return "\n".join(f"  {name}: {memory.resident / GIB:.2f} GiB" for name, memory in largest)


class MemoryWatch:
    """Looks at a run's processes once a second.

    Args:
        limit: GiB that they may hold together; None: any number.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._kills = _kills()
        self._looked = -_EVERY_S
        self._seen: dict[str, tuple[Held, int]] = {}
        """What each process held when it was last seen alive, and how many bytes were free then."""

    def look(self, processes: Mapping[str, int]) -> str | None:
        """A complaint where the workers, name -> process id, with what they started, and this process hold too much."""
        now = time.monotonic()
        if now - self._looked < _EVERY_S:
            return None
        self._looked, available = now, psutil.virtual_memory().available
        of_workers = held_by_workers(processes.values())
        of_each = {name: of_workers[pid] for name, pid in processes.items()}
        # One that is gone holds nothing: of interest is what it held, and what was free then.
        self._seen |= {name: (memory, available) for name, memory in of_each.items() if memory.resident}
        everyone = {**of_each, "the driver": held(os.getpid())}
        if self._limit is None or (total := together(everyone.values()).resident) <= self._limit * GIB:
            return None
        return (
            f"the run's processes hold {total / GIB:.2f} GiB, more than cluster.memory_limit={self._limit:g}:\n"
            f"{table(everyone)}\nUse fewer envs or workers, or recycle those that grow (env.max_memory_gb)."
        )

    def of_killed(self, name: str) -> str:
        """What is known of why a process was killed by SIGKILL, in words."""
        killed, why = _kills() - self._kills, "if nobody did that, the system ran out of memory"
        if killed > 0:
            why = f"the system has killed {killed} process(es) since for want of memory"
        words = f"{why}: use fewer envs or workers"
        if name in self._seen:
            memory, available = self._seen[name]
            words += (
                f" (when last looked at it held {memory.resident / GIB:.2f} GiB, and "
                f"{available / GIB:.2f} GiB were free)"
            )
        return words


def _kills() -> int:
    """Processes that the system has killed for want of memory since it started; 0 where it does not count."""
    try:
        counts = dict(line.split() for line in _VMSTAT.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))
