"""What a run with an accelerator says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied_rl.launch import run
from tests.configs import tiny_math_run, tiny_run
from tests.logged import accounted

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ONE_STEP = ("cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false", "runner.save_interval=-1")


def _scoring(step: dict[str, float]) -> float:
    return step.get("time/scoring", 0.0) + step.get("time/scoring_ahead", 0.0)


def test_policy_and_actor_keep_one_device_busy(tmp_path: Path) -> None:
    [step] = accounted(run(tiny_run(tmp_path, *ONE_STEP)))
    used = step["time/inference"] + _scoring(step) + step["time/update"]
    assert step["busy/device"] == pytest.approx(used)


def test_generation_and_actor_keep_one_device_busy(tmp_path: Path) -> None:
    [step] = accounted(run(tiny_math_run(tmp_path, *ONE_STEP)))
    used = step["time/generate"] + _scoring(step) + step["time/update"]
    assert step["busy/device"] == pytest.approx(used)
