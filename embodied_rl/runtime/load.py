"""How busy the nodes of a run are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from embodied_rl.runtime.memory import GIB


class Load(NamedTuple):
    """Counters of a node at one moment: those of the machine, whoever uses it."""

    at: float
    """Seconds, on the node's own clock."""
    busy: float
    """Seconds that its cores have worked, together."""
    cores: int
    memory: int
    """Bytes in use."""

    @staticmethod
    def here() -> Load:
        times, memory = psutil.cpu_times(), psutil.virtual_memory()
        busy = times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        return Load(time.monotonic(), busy, psutil.cpu_count() or 1, memory.total - memory.available)


def utilisation(before: Sequence[Load], after: Sequence[Load]) -> dict[str, float]:
    """Metrics of the time between two looks at the same nodes: the share of each one's cores that worked, and GiB of
    memory in use at the end."""
    metrics: dict[str, float] = {}
    for number, (first, last) in enumerate(zip(before, after, strict=True)):
        share = (last.busy - first.busy) / max(last.at - first.at, 1e-9) / last.cores
        metrics[f"node{number}/cpu"] = min(max(share, 0.0), 1.0)  # the counters are coarse
        metrics[f"node{number}/memory_gb"] = last.memory / GIB
    return metrics
