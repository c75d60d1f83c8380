"""``python train.py probe`` on policies whose prospects are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.checkpoints.store import complete_checkpoints
from embodied_rl.cli import config_of
from embodied_rl.commands.probe import main
from embodied_rl.errors import UserError
from embodied_rl.launch import run

TINY = (
    "env=dummy",
    "cluster=serial",
    "env.train.total_num_envs=16",
    "env.eval.total_num_envs=8",
    "env.eval.episodes_per_task=4",
)


def probe(folder: Path, *overrides: str) -> dict[str, Any]:
    main([*overrides, f"runner.output_dir={folder}"])
    (file,) = folder.glob("probe_*/*/probe.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("reward", "case"), [("env.reward_coef=1", "dense"), ("env.reward_coef=0", "never")])
def test_a_policy_that_never_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str, case: str
) -> None:
    short = ("env.train.max_episode_steps=2", "env.eval.max_episode_steps=2")
    found = probe(tmp_path, *TINY, *short, reward)
    assert found["case"] == case
    assert found["sampled_rate"] == found["greedy_rate"] == 0
    page = capsys.readouterr().out
    assert "nothing succeeds yet" in page and "03_move_the_point_to_the_goal_in_the_lower_right_quadrant" in page


def test_a_policy_that_always_succeeds(tmp_path: Path) -> None:
    assert probe(tmp_path, *TINY, "env.init_params.success_radius=3")["case"] == "always"


def test_nothing_is_trained_and_nothing_saved(tmp_path: Path) -> None:
    probe(tmp_path, *TINY, "runner.max_steps=3")
    (directory,) = tmp_path.glob("probe_*/*")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert not complete_checkpoints(directory / "checkpoints")


def test_a_model_whose_answers_are_all_alike(tmp_path: Path) -> None:
    """A very low temperature leaves one answer to each prompt."""
    math = ("task=math", "cluster=serial", "data.rollout_batch_size=32", "data.eval_size=32", "runner.max_steps=1")
    cold = probe(tmp_path / "cold", *math, "algorithm.sampling_params.temperature=0.01")
    assert cold["case"] == "alike"
    assert cold["informative"] < 0.1 < cold["expected"]
    warm = probe(tmp_path / "warm", *math)
    assert warm["case"] == "sometimes"
    assert warm["informative"] > 0.2


def test_it_plays_what_the_run_will_play(tmp_path: Path) -> None:
    math = ("task=math", "cluster=serial", "data.rollout_batch_size=16", "data.eval_size=8", "runner.max_steps=1")
    found = probe(tmp_path / "probe", *math)
    run(config_of(*math, "runner.report=false", "runner.save_interval=-1", f"runner.output_dir={tmp_path / 'run'}"))
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    (step,) = (row for line in metrics.read_text().splitlines() if "time/step" in (row := json.loads(line)))
    assert found["informative"] == 1 - step["actor/groups_equal"]
    assert found["sampled_rate"] == step["rollout/accuracy"]


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match=r"expected runner\.init_from"):
        main(["experiment=dummy_grpo", "runner.resume_dir=auto"])
    with pytest.raises(UserError, match="expected one that learns by trying: embodied, math"):
        main(["task=sft"])
