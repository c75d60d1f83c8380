"""How busy the nodes of a run are."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from embodied_rl.runtime.memory import GIB

_STAT: Final = Path("/proc/stat")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


class Load(NamedTuple):
    """Counters of a node at one moment: those of the machine, whoever uses it, and those of the run."""

    at: float
    """Seconds, on the node's own clock."""
    busy: float
    """Seconds that its cores have worked, together."""
    cores: int
    memory: int
    """Bytes in use."""
    idle: float = 0.0
    """Seconds that those ``allowed`` had nothing to do, together."""
    usable: float = 1.0
    """Cores that the run may use: those ``allowed``, or fewer by a quota."""
    workers: Mapping[str, float] = {}
    """Process of the run -> CPU seconds so far, of what it has started, too."""
    allowed: int = 1
    """Cores that the run's processes may be on; whoever is on others is not in their way."""

    @staticmethod
    def here(workers: Mapping[str, float] | None = None) -> Load:
        cores, memory = psutil.cpu_times(percpu=True), psutil.virtual_memory()
        allowed = os.sched_getaffinity(0)
        own = [core for number, core in zip(core_numbers(), cores, strict=False) if number in allowed]
        if len(own) != len(allowed):  # a container that numbers its cores itself, and shows no others
            own = cores
        return Load(
            at=time.monotonic(),
            busy=sum(core.user + core.nice + core.system + core.irq + core.softirq for core in cores),
            cores=len(cores),
            memory=memory.total - memory.available,
            idle=sum(core.idle + core.iowait for core in own),
            usable=usable_cores(),
            allowed=len(own),
            workers=workers or {},
        )


@functools.cache
def core_numbers(stat: Path = _STAT) -> tuple[int, ...]:
    """Numbers of the machine's cores that are on, in the order in which psutil lists them."""
    return tuple(map(int, re.findall(r"^cpu(\d+) ", stat.read_text(), re.MULTILINE)))


@functools.cache
def usable_cores(quota: Path = _QUOTA) -> float:
    """Cores that this process may use: those of its affinity, or fewer by its container's quota.

    Args:
        quota: file of cgroup v2: microseconds, or max, of a period.
    """
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if most == "max" else min(allowed, int(most) / int(period))


def utilisation(before: Sequence[Load], after: Sequence[Load]) -> dict[str, float]:
    """Metrics of the time between two looks at the same nodes: the share of each one's cores that worked, and GiB of
    memory in use at the end."""
    metrics: dict[str, float] = {}
    for number, (first, last) in enumerate(zip(before, after, strict=True)):
        share = (last.busy - first.busy) / max(last.at - first.at, 1e-9) / last.cores
        metrics[f"node{number}/cpu"] = min(max(share, 0.0), 1.0)  # the counters are coarse
        metrics[f"node{number}/memory_gb"] = last.memory / GIB
    return metrics
