"""A new user's way from nothing to an env that learns, as docs/tutorial.md and docs/own_simulator.md have it."""

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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_simulator_of_ones_own_from_an_empty_folder(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    script, page = ROOT / "scripts/new_user_walk.py", ROOT / "docs/own_simulator.md"
    done = subprocess.run([sys.executable, script, tmp_path, page], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, evaluated, kept = sorted((tmp_path / "results/lander").iterdir())
    tables = [first / "eval_step_000000", first / "eval_step_000030", evaluated / "eval_step_000030"]
    before, after, again = (json.loads((table / "eval.json").read_text())["overall"] for table in tables)
    assert before["pc_success"] < 50 and after["pc_success"] > 80 and again["n_episodes"] == 100
    assert again["pc_success"] > 80 and (kept / "report.html").is_file()
    assert (tmp_path / "check_env_gymnasium.png").is_file()
    assert list((tmp_path / "videos").rglob("*land_on_the_pad*.mp4"))
