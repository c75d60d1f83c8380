"""``eval.json`` files for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def episodes(tasks: Sequence[Sequence[int]], seed: int | None = None) -> list[dict[str, Any]]:
    """An entry for each outcome (1: success) of each task."""
    return [
        {
            "task_id": task,
            "instruction": f"put the red block number {task} into the box beside the plate",
            "reset_state_id": 100 * task + state,
            "seed": seed,
            "success": bool(success),
        }
        for task, outcomes in enumerate(tasks)
        for state, success in enumerate(outcomes)
    ]


def completions(prompts: Sequence[Sequence[bool | None]]) -> list[dict[str, Any]]:
    """An entry for each completion of each prompt."""
    return [
        {"prompt_id": f"{number:016x}", "prompt": number, "source": "sums", "correct": correct}
        for number, group in enumerate(prompts)
        for correct in group
    ]


def write(path: Path, entries: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], kind: str = "episodes") -> str:
    """Write the file and return its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": 2, "kind": kind, "meta": dict(meta), "overall": {}, kind: list(entries)}
    path.write_text(json.dumps(content))
    return path.as_posix()
