"""The moving picture of a task before and after training."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from embodied_rl.errors import UserError
from embodied_rl.launch import run
from tests.configs import tiny_run

SCRIPT = Path(__file__).parents[2] / "scripts/before_after.py"


def test_both_evaluations_move_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "cluster=serial",
        "runner.val_before_train=true",
        "runner.max_steps=1",
        "env.eval.video_cfg.save_video=true",
    )
    directory, out = run(tiny_run(tmp_path, *options)), tmp_path / "task.gif"
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("after against before: the same 8 episodes") < said.index("evaluated: ")
    files = list((tmp_path / "videos").glob("*/before_after/task_0?_move_the_point*.mp4"))
    assert len(files) == 4 and "(4, before on the left, after on the right)" in said
    monkeypatch.setattr(sys, "argv", ["before_after.py", str(directory), "1", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    with Image.open(out) as picture:
        assert getattr(picture, "n_frames", 1) > 1
        assert picture.width == 2 * 384 + 8
    monkeypatch.setattr(sys, "argv", ["before_after.py", str(directory), "99", str(out)])
    with pytest.raises(UserError, match="no video of task 99"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
