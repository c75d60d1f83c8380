"""CPU time of a node's workers, as the kernel counts it: one clock read a process."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

from embodied_rl.runtime.process_groups import members

_EVERY_S: Final = 1.0
"""Interval to look for processes that workers have started."""
_SCHEDULED: Final = 2
"""``CPUCLOCK_SCHED``: time on a core, of all threads, in nanoseconds."""


def cpu_seconds(pid: int) -> float | None:
    """Seconds that the threads of a process have been on a core, those that ended included; None: it is gone.

    The clock of another process, as clock_getcpuclockid(3) names it, which Python does not offer.
    """
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except OSError:
        return None


class CpuTimes:
    """Seconds of each worker, with the processes that it started: a worker leads a process group of its own.

    Of what it starts, the time before the first look counts, that after the last one before its end does not.
    """

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        """Process group -> its worker, for as long as that runs."""
        self._members: dict[int, str] = {}
        """Process -> its worker."""
        self._seconds: dict[tuple[str, int], float] = {}
        """Of each process of a worker when it was last looked at."""
        self._looked = -_EVERY_S

    def add(self, name: str, pid: int) -> None:
        """A worker that was started; one in the place of another goes on with its name."""
        self._groups[pid] = self._members[pid] = name

    def read(self) -> dict[str, float]:
        """Worker -> its seconds so far."""
        now = time.monotonic()
        if now - self._looked >= _EVERY_S:
            self._looked = now
            self._find_children()
        for pid, name in list(self._members.items()):
            if (seconds := cpu_seconds(pid)) is None:
                del self._members[pid]
                self._groups.pop(pid, None)
            else:
                self._seconds[name, pid] = seconds
        found: defaultdict[str, float] = defaultdict(float)
        for (name, _), seconds in self._seconds.items():
            found[name] += seconds
        return dict(found)

    def _find_children(self) -> None:
        for leader, pids in members(self._groups).items():
            self._members |= dict.fromkeys(pids, self._groups[leader])
