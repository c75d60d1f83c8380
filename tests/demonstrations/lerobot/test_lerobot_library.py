"""The package lerobot reads what we write."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.cli import config_of
from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.launch import run
from tests.demonstrations.lerobot.recordings import data_set, level

PYTHON = Path(__file__).parents[3] / ".venv-lerobot/bin/python"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-lerobot; scripts/lerobot_env.sh builds it"),
]


def as_lerobot_reads(root: Path, frames: Sequence[int], directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("lerobot_reader.py"), root, *map(str, frames)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "PYTHONPATH": ""},
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("image_format", ["video", "png"])
def test_lerobot_reads_what_was_collected(tmp_path: Path, image_format: str) -> None:
    """Every number, and pictures, which may lose something in a video, by a pixel."""
    config = config_of(
        "task=collect",
        "env=dummy",
        "env.init_params.image_size=16",
        "cluster=serial",
        "collect.episodes_per_task=1",
        f"collect.image_format={image_format}",
        f"collect.path={tmp_path / 'data'}",
        f"runner.output_dir={tmp_path / 'results'}",
        "runner.logger.logger_backends=[jsonl]",
    )
    run(config)
    ours = Demonstrations(tmp_path / "data", chunk=1)
    frames = range(ours.num_frames)
    obs, actions, _ = ours.sample(frames)
    got = as_lerobot_reads(tmp_path / "data", frames, tmp_path)
    assert (got["episodes"], got["frames"], got["fps"]) == (4, ours.num_frames, 10)
    assert got["state"] == obs.state.tolist()
    assert [row[0] for row in got["action"]] == actions[:, 0].tolist()
    assert got["task"] == list(obs.instructions)
    assert got["level"] == pytest.approx(obs.images["agentview"][:, 8, 8, 1].tolist(), abs=1)


@pytest.mark.parametrize("videos", [True, False])
def test_lerobot_reads_our_data_sets(tmp_path: Path, videos: bool) -> None:
    root = data_set(tmp_path / "data", [5, 12, 7], videos=videos)
    frames = [0, 4, 5, 11, 12, 23]
    got = as_lerobot_reads(root, frames, tmp_path)
    places = [(e, t) for e, n in ((0, 5), (2, 7), (1, 12)) for t in range(n)]
    wanted = [places[frame] for frame in frames]
    lengths = {0: 5, 1: 12, 2: 7}
    assert (got["episodes"], got["frames"], got["fps"]) == (3, 24, 20)
    assert got["task"] == [f"do task {e % 2}" for e, _ in wanted]
    assert got["state"] == [[e, t, 0.5] for e, t in wanted]
    assert got["padded"] == [[False, t + 1 == lengths[e]] for e, t in wanted]
    assert [row[0][0] for row in got["action"]] == pytest.approx([e + t / 100 for e, t in wanted])
    assert got["level"] == pytest.approx([level(e, t) for e, t in wanted], abs=2)
    assert got["success"] == [t + 1 == lengths[e] for e, t in wanted]
    assert got["mean"] == pytest.approx([sum(e + t / 100 for e, t in places) / 24] * 2)
    assert got["image_shape"] == [3, 1, 1]
