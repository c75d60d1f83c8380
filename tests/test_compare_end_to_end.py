"""Two checkpoints of a run, evaluated and compared by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def train_py(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_two_checkpoints_are_compared_on_the_same_episodes(tmp_path: Path) -> None:
    done = train_py(
        "experiment=dummy_grpo",
        "cluster=serial",
        f"runner.output_dir={tmp_path}",
        "runner.max_steps=2",
        "runner.val_before_train=true",
        "env.eval.video_cfg.save_video=false",
        "env.init_params.success_radius=0.5",
        "runner.logger.logger_backends=[jsonl,tensorboard]",
        "cluster.num_threads.actor=1",
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "dummy_grpo"
    compared = train_py("compare", f"{run}:0", str(run), "--json", str(tmp_path / "c.json"))
    assert compared.returncode == 0, compared.stderr
    assert max(map(len, compared.stdout.splitlines()[:-1])) <= 80
    [comparison] = json.loads((tmp_path / "c.json").read_text())["comparisons"]
    before, after = (json.loads(next(run.glob(f"*/eval_step_{step:06d}/eval.json")).read_text()) for step in (0, 2))
    overall = comparison["overall"]
    assert overall["pairs"] == before["overall"]["n_episodes"] == 64
    assert 100 * overall["first"] == before["overall"]["pc_success"]
    assert 100 * overall["second"] == after["overall"]["pc_success"]
    gained = [b["success"] - a["success"] for a, b in zip(before["episodes"], after["episodes"], strict=True)]
    assert (overall["won"], overall["lost"]) == (gained.count(1), gained.count(-1))
    [metrics] = run.glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    name = "eval_task/02_move_the_point_to_the_goal_in_the_lower_left_quadrant/success"
    assert 100 * last[name] == after["per_task"][2]["pc_success"]
    assert sum(key.startswith("env_task/") for key in last) == 4

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(metrics.parent / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars(name)] == [0, 2]

    refused = train_py("compare", f"{run}:0", str(tmp_path / "nowhere"))
    assert refused.returncode == 2
    assert "no such file or directory" in refused.stderr and "Traceback" not in refused.stderr
