"""The package lerobot reads what we write."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.demonstrations.lerobot.recordings import data_set, level

PYTHON = Path(__file__).parents[3] / ".venv-lerobot/bin/python"


@pytest.mark.slow
@pytest.mark.parametrize("videos", [True, False])
def test_lerobot_reads_our_data_sets(tmp_path: Path, videos: bool) -> None:
    if not PYTHON.exists():
        pytest.skip("no .venv-lerobot; scripts/lerobot_env.sh builds it")
    root = data_set(tmp_path / "data", [5, 12, 7], videos=videos)
    frames = [0, 4, 5, 11, 12, 23]
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("lerobot_reader.py"), root, *map(str, frames)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
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
