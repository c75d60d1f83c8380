"""One training step of the main job with each small policy that denoises actions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.flow_models import POLICIES

pytest.importorskip("libero", reason="the libero extra is not installed")

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    "task=embodied",
    "env=libero_10",
    "env.task_ids=[0,5]",
    "env.train.total_num_envs=8",
    "env.train.max_episode_steps=20",
    "env.eval.total_num_envs=4",
    "env.eval.max_episode_steps=20",
    "env.eval.episodes_per_task=2",
    "env.eval.video_cfg.save_video=false",
    "model.params.num_steps=4",
    "runner.max_steps=1",
    "runner.logger.logger_backends=[jsonl]",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("pi0", ["algorithm=grpo", "algorithm.group_size=2"]),
        ("smolvla", ["algorithm=ppo", "model.params.noise_method=flow_noise"]),
    ],
)
def test_a_training_step_and_an_evaluation(model: str, overrides: list[str], tmp_path: Path) -> None:
    POLICIES[model].write_tiny(tmp_path / "tiny")
    where = [f"model={model}", f"model.path={tmp_path / 'tiny'}", f"runner.output_dir={tmp_path / 'results'}"]
    command = [sys.executable, "train.py", *SMALL, *where, *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [path] = (tmp_path / "results").glob("*/*/metrics.jsonl")
    metrics = json.loads(path.read_text().splitlines()[-1])
    assert metrics["env/steps"] == 8 * 20
    assert metrics["actor/samples"] == 8 * 2
    assert metrics["eval/episodes"] == 4
    assert all(math.isfinite(value) for value in metrics.values())
    if model == "smolvla":
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/ratio"] == pytest.approx(1.0, abs=0.05)
