"""Run directories for tests, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.commands.evaluations import episodes, write

META = {"env_type": "dummy", "max_episode_steps": 32, "versions": {"torch": "2.13.0"}, "policy_version": 0}
CONFIG = {
    "runner": {
        "task_type": "embodied",
        "experiment_name": "by_hand",
        "output_dir": "results",
        "max_steps": 4,
        "only_eval": False,
    },
    "actor": {"seed": 1, "optim": {"lr": 0.001}},
    "model": {"model_type": "mlp"},
    "env": {"name": "dummy", "eval": {"video_cfg": {"video_base_dir": "videos"}}},
}


def _trained(
    step: int, success: float, env_steps: float, entropy: float | None, seconds: tuple[float, ...]
) -> dict[str, Any]:
    names = ("time/step", "time/rollout", "time/advantage", "time/update", "time/sync")
    return {
        "step": step,
        "env/success_once": success,
        "env/steps_total": env_steps,
        "actor/entropy": entropy,
        **dict(zip(names, seconds, strict=True)),
    }


def _evaluated(overall: float, seconds: float, left: float, right: float) -> dict[str, Any]:
    tasks = {"eval_task/00_left/success": left, "eval_task/01_right/success": right}
    return {"eval/success_rate": overall, "eval/seconds": seconds, **tasks}


ROWS: Final[list[dict[str, Any]]] = [
    {"step": 0, **_evaluated(0.25, 2.0, 0.5, 0.0)},
    _trained(1, 0.1, 100.0, 0.9, (10.0, 6.0, 0.5, 2.5, 0.5)),
    _trained(2, 0.3, 200.0, None, (12.0, 7.0, 0.5, 3.5, 0.5)),
    _trained(3, 0.5, 280.0, 0.7, (8.0, 4.0, 0.5, 2.5, 0.5)),
    _trained(4, 0.7, 350.0, 0.6, (8.0, 4.0, 0.5, 2.5, 0.5)) | _evaluated(0.875, 3.0, 1.0, 0.75),
]
BEFORE, AFTER = [[1, 1, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]]
"""Two tasks of four episodes."""


def make_run(
    path: Path,
    *,
    rows: Sequence[Mapping[str, Any]] = ROWS,
    changes: Mapping[str, Any] | None = None,
    evaluated: Mapping[int, Sequence[Sequence[int]]] | None = None,
) -> Path:
    """A finished run, success 2 of 8 before and 7 of 8 after.

    Args:
        changes: dotted key of the configuration -> value.
        evaluated: step -> outcomes of each task.
    """
    config = json.loads(json.dumps(CONFIG))
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, outcomes in ({0: BEFORE, 4: AFTER} if evaluated is None else evaluated).items():
        write(path / f"eval_step_{step:06d}" / "eval.json", episodes(outcomes), META)
    return path
