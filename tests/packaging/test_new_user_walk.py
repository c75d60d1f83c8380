"""A new user's way from nothing to an env that learns, as docs/tutorial.md has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_user_gets_an_env_that_learns_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    script = ROOT / "scripts/new_user_walk.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [run] = (tmp_path / "results/slider").iterdir()
    rates = [
        json.loads((run / f"eval_step_{step:06d}/eval.json").read_text())["overall"]["pc_success"] for step in (0, 40)
    ]
    assert rates[0] < 20 and rates[1] > 80, rates
    assert (run / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "videos").rglob("task_00_bring_the_slider_to_the_target_*.mp4"))
