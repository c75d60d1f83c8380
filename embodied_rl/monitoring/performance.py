"""A training step's time against the least that its work allows, and where the rest goes.

The work of a step is the CPU time of every process of the run, and the phases of those that use an accelerator. No
order of that work makes the step shorter than its *ideal*: the time of the busiest resource, which is either the cores,
all full, or one worker or accelerator that works without a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from embodied_rl.runtime.load import Load

CORES: Final = "cores"
DEVICE: Final = "device"
ROLLOUT: Final = "rollout"
"""The part of a step that :data:`Waits` are of."""
Waits = Mapping[str, float]
"""Seconds of a step's rollouts in which workers waited, the mean over the workers of a kind; those that a task has of

requests: policies, for observations
answers: envs, for actions
weights: policies, for weights that came in the middle
stragglers: workers that had finished, for the slowest of them
resets: policies, for the longest reset, before which nobody acts
reset_spread: env workers whose envs were reset, for the slowest of them
"""
_CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    CORES: ("weights", "reset_spread", "stragglers", "answers", "requests"),
    "env": ("weights", "reset_spread", "stragglers", "answers"),
    "rollout": ("weights", "resets", "stragglers", "requests"),
    DEVICE: ("weights", "resets", "stragglers", "requests"),
}
"""Busiest resource -> what it can wait for in a rollout, in the order in which its pauses are put down to that."""
_NAMES: Final = {"reset_spread": "resets", "weights": "sync"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a training step, as the driver goes through them."""

    name: str
    seconds: float
    cores: Sequence[float]
    """Of each node: CPU seconds of the run's processes, by the cores that it may use there."""
    workers: Mapping[str, float]
    """Process -> CPU seconds."""
    others: float = 0.0
    """Seconds that other programs took from all cores that the run may use, of the node with most: their CPU time
    beyond what nobody wanted."""


def spread(seconds: Sequence[float]) -> float:
    """The mean wait for the slowest."""
    return max(seconds) - sum(seconds) / len(seconds) if seconds else 0.0


class StepWatch:
    """Measures the parts of a training step: from one look at the run's processes to the next.

    Args:
        loads: looks.
    """

    def __init__(self, loads: Callable[[], Sequence[Load]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._look, self._clock = loads, clock
        self.parts: list[Part] = []
        """Of the present step."""
        self.first: Sequence[Load] = []
        """The step's first look."""
        self.last: Sequence[Load] = []
        """The newest one."""

    def begin(self) -> float:
        """A step begins: now, by the clock."""
        self.parts = []
        self.first = self.last = self._look()
        self._at = self._clock()
        return self._at

    def end(self, name: str) -> None:
        """End a part: what followed the one before it."""
        before, began = self.last, self._at
        self._at, self.last = self._clock(), self._look()
        spent = [
            {name: max(seconds - first.workers.get(name, 0.0), 0.0) for name, seconds in last.workers.items()}
            for first, last in zip(before, self.last, strict=True)
        ]
        workers: dict[str, float] = {}
        for of_node in spent:
            workers |= of_node
        own = [sum(of_node.values()) for of_node in spent]
        self.parts.append(
            Part(
                name=name,
                seconds=self._at - began,
                cores=[seconds / load.usable for seconds, load in zip(own, self.last, strict=True)],
                workers=workers,
                others=max(map(_taken, own, before, self.last)),
            )
        )


def _taken(own: float, first: Load, last: Load) -> float:
    """See :attr:`Part.others`, of one node.

    Args:
        own: the run's CPU seconds.
    """
    idle = last.idle - first.idle
    others = (last.at - first.at) * last.allowed - idle - own
    return max(others - idle, 0.0) / last.usable


def performance(
    parts: Sequence[Part],
    *,
    component: Callable[[str], str],
    threads: Mapping[str, int],
    devices: Sequence[Mapping[str, float]],
    waits: Waits,
) -> dict[str, float]:
    """``perf/``, ``busy/``, ``cpu/`` and ``gap/`` metrics of a training step. ``gap/`` sums up to the step's seconds
    less the ideal: for each part the pauses of the busiest resource.

    Args:
        parts: whose sum is the step.
        component: process -> its component.
        threads: component -> the most cores that a worker of it can fill; others: 1.
        devices: of each accelerator, part -> seconds in which it was used.
    """
    total = sum(part.seconds for part in parts)
    candidates: dict[str, list[list[float]]] = {
        CORES: [list(of_node) for of_node in zip(*(part.cores for part in parts), strict=True)]
    }
    cpu: dict[str, float] = {}
    for worker in {name: None for part in parts for name in part.workers}:
        name, seconds = component(worker), [part.workers.get(worker, 0.0) for part in parts]
        candidates.setdefault(name, []).append([each / threads.get(name, 1) for each in seconds])
        cpu[name] = cpu.get(name, 0.0) + sum(seconds)
    if devices:
        candidates[DEVICE] = [[used.get(part.name, 0.0) for part in parts] for used in devices]
    # Clocks are read one after the other, and phases of a rollout that ran ahead belong to earlier parts.
    busy = {
        name: max(([min(*pair) for pair in zip(row, _seconds(parts), strict=True)] for row in rows), key=sum)
        for name, rows in candidates.items()
        if rows
    }
    busiest = max(busy, key=lambda name: sum(busy[name]))
    ideal = sum(busy[busiest])
    return {
        "perf/ideal_s": ideal,
        "perf/reached": ideal / total,
        **{f"busy/{name}": sum(seconds) for name, seconds in busy.items()},
        **{f"cpu/{name}": seconds for name, seconds in cpu.items()},
        **{f"gap/{name}": seconds for name, seconds in _gaps(parts, busiest, busy[busiest], waits).items()},
    }


def _seconds(parts: Sequence[Part]) -> list[float]:
    return [part.seconds for part in parts]


def _gaps(parts: Sequence[Part], busiest: str, busy: Sequence[float], waits: Waits) -> dict[str, float]:
    """Cause, or the part of the step where none is known -> seconds of a pause."""
    gaps = {"others": 0.0} | {_NAMES.get(cause, cause): 0.0 for cause in waits}
    for part, seconds in zip(parts, busy, strict=True):
        left = part.seconds - seconds
        taken = min(left, part.others)
        gaps["others"] += taken
        left -= taken
        for cause in _CAUSES.get(busiest, ()) if part.name == ROLLOUT else ():
            if cause in waits:
                share = min(left, waits[cause])
                gaps[_NAMES.get(cause, cause)] += share
                left -= share
        gaps[part.name] = gaps.get(part.name, 0.0) + left
    return gaps
