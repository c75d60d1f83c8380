from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.killed import Outcome, same


def outcome(*successes: float, **other: Any) -> Outcome:
    lines = [{"step": step, "env/success_once": rate} for step, rate in enumerate(successes, 1)]
    return Outcome(**{"status": 0, "seconds": 1.0, "kills": 0, "restarts": 0, "lines": lines, **other})


def test_two_runs_are_the_same_number_for_number() -> None:
    assert same(outcome(0.1, 0.2), outcome(0.1, 0.2, kills=3, restarts=3, seconds=9.0))
    assert not same(outcome(0.1, 0.2), outcome(0.1, 0.2 + 1e-12))
    assert not same(outcome(0.1, 0.2), outcome(0.1))
    assert not same(outcome(0.1), outcome(0.1, status=1)), "it did not come to its end"


@pytest.mark.slow
def test_killed_workers_change_nothing(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    command = [sys.executable, "-m", "benchmarks.killed", "--seeds", "1", "--every", "2", "--out", out]
    done = subprocess.run(
        [*command, "experiment=dummy_grpo", "runner.max_steps=8", "env.eval.video_cfg.save_video=false"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].strip() == "passes"
