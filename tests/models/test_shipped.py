"""The weights that come with the project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from embodied_rl.cli import config_of
from embodied_rl.launch import run
from embodied_rl.models.folders import SHIPPED

FOLDERS = sorted(path for path in SHIPPED.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_small_and_says_where_it_comes_from(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6e6
    text = (folder / "README.md").read_text()
    assert "python train.py" in text and "commit" in text


def test_arithmetic_lm_is_as_good_as_it_says(tmp_path: Path) -> None:
    said = re.search(r"(\d+) of 256", (SHIPPED / "arithmetic_lm" / "README.md").read_text())
    assert said
    config = config_of("task=math", "cluster=serial", "runner.only_eval=true", f"runner.output_dir={tmp_path}")
    run(config)
    [report] = tmp_path.glob("*/*/eval_step_000000/eval.json")
    solved = json.loads(report.read_text())["overall"]["n_solved"]
    assert abs(solved - int(said[1])) <= 5, "rounding may turn a few"
