"""The main job on the real simulator: train, be killed, go on, evaluate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import pytest

pytest.importorskip("libero", reason="the libero extra is not installed")

REPOSITORY = Path(__file__).parents[1]
SMALL = (
    "task=embodied",
    "env=libero_10",
    "algorithm=grpo",
    "env.task_ids=[0,5]",
    "env.train.total_num_envs=8",
    "algorithm.group_size=2",
    "env.train.max_episode_steps=16",
    "env.eval.total_num_envs=4",
    "env.eval.max_episode_steps=16",
    "env.eval.episodes_per_task=2",
    "runner.logger.logger_backends=[jsonl]",
)


def command(directory: Path, *overrides: str) -> list[str]:
    where = (f"runner.output_dir={directory}/results", f"env.eval.video_cfg.video_base_dir={directory}/videos")
    return [sys.executable, "train.py", *SMALL, *where, *overrides]


def train(directory: Path, *overrides: str) -> str:
    done = subprocess.run(
        command(directory, *overrides), cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
@pytest.mark.timeout(1500)
def test_grpo_on_libero_survives_a_kill_and_is_evaluated(tmp_path: Path) -> None:
    first = subprocess.Popen(command(tmp_path, "runner.max_steps=3"), cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 500
        while not (saved := list(tmp_path.glob("results/*/*/checkpoints/global_step_2/state.json"))):
            assert first.poll() is None, "the run ended before its second checkpoint"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    run_dir = saved[0].parents[2]

    out = train(tmp_path, "runner.max_steps=3", "runner.resume_dir=auto")
    assert str(run_dir) in out
    assert steps_of(run_dir) == [1, 2, 3]
    assert (run_dir / "checkpoints/global_step_3/state.json").is_file()

    tables = []
    for _ in range(2):
        out = train(tmp_path, "runner.only_eval=true", f"runner.resume_dir={run_dir}")
        [path] = [line.split(None, 1)[1] for line in out.splitlines() if line.startswith("table:")]
        table = json.loads(Path(path).read_text())
        del table["timing"]
        tables.append(table)
    assert tables[0] == tables[1]
    assert tables[0]["meta"]["policy_version"] == 3
    assert tables[0]["overall"]["n_episodes"] == 4
    for row in tables[0]["per_task"]:
        assert row["n_episodes"] == 2
        assert len(row["pc_success_ci95"]) == 2

    videos = sorted(tmp_path.glob("videos/*-eval/**/*.mp4"))
    assert len(videos) == 2 * len(tables[0]["overall"]["video_paths"]) > 0
    with av.open(str(videos[0])) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert video.streams.video[0].average_rate == 20
    assert len(frames) == 17  # the reset and 16 steps
    assert frames[0].std() > 20
    assert abs(frames[0].astype(int) - frames[-1]).mean() > 0.5
