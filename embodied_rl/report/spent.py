"""Where a run's time went."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from embodied_rl.report.data import EVAL_S, STEP_S, Run

_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout": ("time/rollout",),
    "update": (
        *("time/load", "time/advantage", "time/scoring", "time/values", "time/encoding"),
        *("time/critic", "time/update", "time/buffer", "time/offload"),
    ),
    "weight sync": ("time/sync",),
}
"""Part of a training step -> the metrics that it is the sum of."""
_REST: Final = "rest of a step"
_WITHIN: Final[Mapping[str, str]] = {
    "time/env": "simulating",
    "time/reset": "resetting envs",
    "time/reset_ahead": "resetting envs while the actor updates",
    "time/env_wait": "envs waiting for actions",
    "time/inference": "computing actions",
    "time/inference_wait": "policy waiting for observations",
    "time/weights_wait": "policy waiting for the update's weights",
    "time/generate": "generating answers",
    "time/reward": "scoring answers",
    "time/advantage": "advantages",
    "time/scoring": "log-probabilities anew",
    "time/scoring_ahead": "log-probabilities anew and a critic's values, beside the rollout",
    "time/values": "a critic's values",
    "time/encoding": "pictures, for all passes of the update",
    "time/critic": "a critic's gradients and optimiser",
    "time/update": "gradients and optimiser",
    "time/load": "weights to the accelerator",
    "time/offload": "weights back to the host",
    "time/buffer": "filling the replay buffer",
}
_GAPS: Final[Mapping[str, str]] = {
    "gap/answers": "envs wait for actions",
    "gap/requests": "the policy waits for observations",
    "gap/resets": "envs reset",
    "gap/stragglers": "the slowest worker finishes",
    "gap/rollout": "rest of the rollout",
    "gap/data": "demonstrations are read",
    "gap/update": "the actor updates",
    "gap/sync": "weights travel",
    "gap/rest": "the driver sums up",
    "gap/others": "other programs have the cores",
}
"""Metric of the busiest resource's pauses -> what happens meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Seconds of all steps beyond the least that their work allows."""

    reached: float
    """That least, as a share of the steps."""
    pauses: tuple[tuple[str, float], ...]
    """What the busiest resource waits for, and how long; the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Wall seconds of a run."""

    parts: tuple[tuple[str, float, int], ...]
    """Part, its seconds, and its colour's number."""
    total: float
    steps: tuple[float, ...]
    by_step: Mapping[str, tuple[float, ...]]
    """Part of a step -> its seconds in each of ``steps``."""
    within: tuple[tuple[str, float], ...]
    """Work of the slowest worker of its kind, which may go on beside others'."""
    gap: Gap | None
    """None where no step says."""


def spent(run: Run) -> Spent | None:
    """Seconds by part; None where nothing was timed."""
    rows = [row for row in run.rows if _seconds(row, STEP_S) > 0]
    by_step = {
        part: tuple(math.fsum(_seconds(row, name) for name in names) for row in rows) for part, names in _PARTS.items()
    }
    by_step[_REST] = tuple(
        max(_seconds(row, STEP_S) - math.fsum(values[index] for values in by_step.values()), 0.0)
        for index, row in enumerate(rows)
    )
    parts = {part: math.fsum(values) for part, values in by_step.items()} | {"evaluation": run.total(EVAL_S)}
    timed = math.fsum(parts.values())
    if not timed:
        return None
    outside = _elapsed(run)
    if outside is not None and outside > timed:
        parts["start, checkpoints, end"] = outside - timed
    return Spent(
        parts=tuple((part, seconds, index) for index, (part, seconds) in enumerate(parts.items()) if seconds > 0),
        total=math.fsum(parts.values()),
        steps=tuple(float(row["step"]) for row in rows),
        by_step=by_step if rows else {},
        within=tuple((label, run.total(name)) for name, label in _WITHIN.items() if run.total(name) > 0),
        gap=_gap(run),
    )


def _gap(run: Run) -> Gap | None:
    ideal = run.total("perf/ideal_s")
    if not ideal:
        return None
    pauses = {label: run.total(name) for name, label in _GAPS.items() if run.total(name) > 0}
    return Gap(
        reached=ideal / (ideal + math.fsum(pauses.values())),
        pauses=tuple(sorted(pauses.items(), key=lambda pause: -pause[1])),
    )


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _elapsed(run: Run) -> float | None:
    """Seconds from start to end over all starts; None where an end is not known."""
    total = 0.0
    for index, start in enumerate(run.starts):
        end = start.get("ended")
        if end is None and index == len(run.starts) - 1 and run.under_way:
            end = datetime.datetime.now().astimezone().isoformat()
        try:
            begun, ended = (datetime.datetime.fromisoformat(str(time)) for time in (start.get("started"), end))
        except ValueError:
            return None
        total += (ended - begun).total_seconds()
    return total or None
