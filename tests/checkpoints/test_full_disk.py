"""A disk that is full ends a run with one message, and what was saved before stays whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embodied_rl.errors import UserError
from embodied_rl.launch import run
from tests.configs import tiny_math_run

BY_TEXT = "reward.function=tests.language.rewards.scores:by_text"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a folder on a disk of so many KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def make(size: int) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
            pytest.skip("only root can mount a small disk")
        mounted = True
        return folder

    yield make
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_dir(folder: Path) -> Path:
    [directory] = (folder / "results" / "math_arithmetic").iterdir()
    return directory


def test_a_checkpoint_that_does_not_fit_leaves_the_others_whole(disk: Callable[[int], Path]) -> None:
    folder = disk(1750)  # between five checkpoints and six, with what is written beside them
    with pytest.raises(UserError, match=r"cannot be written: .*No space left on device. Is the disk full"):
        run(tiny_math_run(folder, BY_TEXT, "runner.max_steps=9", "runner.max_keep=9", "runner.eval_at_end=false"))
    saved = sorted(path.name for path in (run_dir(folder) / "checkpoints").glob("global_step_*"))
    assert 1 <= len(saved) < 9
    assert saved == [f"global_step_{step}" for step in range(1, len(saved) + 1)]
    subprocess.run(["mount", "-o", "remount,size=8m", str(folder)], check=True)
    run(
        tiny_math_run(
            folder, BY_TEXT, f"runner.max_steps={len(saved) + 1}", "runner.max_keep=9", "runner.resume_dir=auto"
        )
    )
    names = [path.name for path in (run_dir(folder) / "checkpoints").iterdir()]
    assert sorted(names) == [*saved, f"global_step_{len(saved) + 1}"], "what was half written is gone"


def test_samples_that_do_not_fit_are_one_message(disk: Callable[[int], Path]) -> None:
    folder = disk(48)
    with pytest.raises(UserError, match=r"No space left on device; make room, then go on with runner.resume_dir=/"):
        run(tiny_math_run(folder, BY_TEXT, "runner.max_steps=50", "runner.save_interval=-1"))


def test_a_run_that_cannot_go_on_keeps_its_configuration(disk: Callable[[int], Path]) -> None:
    folder = disk(4000)
    options = (BY_TEXT, "runner.eval_at_end=false", "runner.resume_dir=auto")
    run(tiny_math_run(folder, *options, "runner.max_steps=1"))
    path = run_dir(folder) / "config.yaml"
    before = path.read_text()
    with (folder / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(folder).free)
    longer = f"runner.about={'x' * 50_000}"
    with pytest.raises(UserError, match=r"No space left on device; make room, then go on with runner.resume_dir=/"):
        run(tiny_math_run(folder, *options, "runner.max_steps=2", longer))
    assert path.read_text() == before
