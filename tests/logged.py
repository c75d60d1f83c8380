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
    "eval/seconds",
    "eval/wait_seconds",
    "rollout/env_steps_per_s",
    "rollout/tokens_per_s",
)
"""Beginnings of metrics that depend on the clock or the machine."""


def repeatable(line: dict[str, float]) -> dict[str, float]:
    """The metrics that are the same whenever and wherever a run is made."""
    return {name: value for name, value in line.items() if not name.startswith(TIMED)}


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Logged lines without the others."""
    return [repeatable(json.loads(line)) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
