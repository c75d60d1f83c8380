"""Metrics as ``metrics.jsonl``: one JSON object a step, readable with ``pandas.read_json(path, lines=True)``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.errors import UserError
from embodied_rl.files import atomic
from embodied_rl.monitoring.backend import RunInfo

FILE_NAME = "metrics.jsonl"


class JsonlBackend:
    """Every call reaches the file at once. A further call for the same step rewrites that step's line with both.

    A value that is not finite is written as null, as JSON has no NaN.
    """

    def __init__(self, run: RunInfo) -> None:
        path = run.run_dir / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _drop_steps_from(path, run.first_step)
        self._file = path.open("a+b")
        self._line: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._line_start = sum(len(line) for line in kept[:-1])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._line.get("step"):
            self._file.truncate(self._line_start)
        else:
            self._line, self._line_start = {"step": step}, self._file.seek(0, 2)
        self._line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(self._line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def logged_before(run_dir: Path, metric: str, step: int) -> float | None:
    """What the run's file says of ``metric`` at ``step``; None if it does not."""
    path = run_dir / FILE_NAME
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}") and (values := json.loads(line)).get("step") == step:
                return values.get(metric)
    return None


def _drop_steps_from(path: Path, first_step: int) -> list[bytes]:
    """Keep and return the lines of earlier steps; drop a last line that a killed process left incomplete."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: expected a JSON object with a 'step'; got {line[:80]!r}. Repair or move the file."
            ) from error
        if step < first_step:
            kept.append(line)
    if kept != lines:
        with atomic(path) as scratch:
            scratch.write_bytes(b"".join(kept))
    return kept
