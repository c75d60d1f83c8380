"""What runs log, for comparison between runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

TIMED: Final = (
    "time/",
    "node",
    "perf/",
    "memory/",
    "busy/",
    "cpu/",
    "gap/",
    "eval/seconds",
    "eval/wait_seconds",
    "rollout/env_steps_per_s",
    "rollout/tokens_per_s",
)
"""Beginnings of metrics that depend on the clock or the machine."""


def repeatable(line: dict[str, float]) -> dict[str, float]:
    """The metrics that are the same whenever and wherever a run is made."""
    return {name: value for name, value in line.items() if not name.startswith(TIMED)}


def accounted(run_dir: Path) -> list[dict[str, float]]:
    """The training steps of a run, of each of which it is known where its time went."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    for step in steps:
        whole = step["perf/ideal_s"] / step["perf/reached"]
        assert 0 < step["perf/reached"] <= 1
        assert step["time/step"] <= whole <= step["time/step"] + 1, "and the driver's sums"
        gaps = {name: seconds for name, seconds in step.items() if name.startswith("gap/")}
        assert min(gaps.values()) >= 0 and abs(sum(gaps.values()) - (whole - step["perf/ideal_s"])) < 1e-6
        busy = {name: seconds for name, seconds in step.items() if name.startswith("busy/")}
        assert step["perf/ideal_s"] == max(busy.values())
        assert min(step["cpu/actor"], step["cpu/driver"]) > 0 <= step["cpu/rollout"]
    return steps


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Logged lines without the others."""
    return [repeatable(json.loads(line)) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
