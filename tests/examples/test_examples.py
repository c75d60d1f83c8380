"""The examples, as a user runs them from a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = {
    "from_python": r"--> after 20 steps: \d+% of 64 episodes(.|\n)*\[\[",
    "own_algorithm": r"success: 0% before training, ([5-9]\d|100)% after",
    "own_env": r"in the middle: \d+% before training, (9\d|100)% after",
    "own_policy": r"success: \d% before training, [2-9]\d% after",
    "own_reward": r"mean reward of each step: \d\.\d+, ",
}
"""Example -> what it prints."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_its_number(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWN[name], done.stdout), done.stdout
