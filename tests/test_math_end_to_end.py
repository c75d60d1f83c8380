"""Whole runs of ``task=math`` through the launcher: in one process and in several, and again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.schema import MathConfig
from tests.checkpoints.saved import saved_tensors, saved_weights
from tests.configs import tiny_math_run
from tests.logged import metrics_of

BY_TEXT = "reward.function=tests.language.rewards.scores:by_text"


def run_dir(config: MathConfig) -> Path:
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return directory


def samples_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_close(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4, nan_ok=True)


def test_two_steps_in_one_process_and_in_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serial, process = (
        tiny_math_run(tmp_path / name, BY_TEXT, f"cluster={name}", "runner.val_before_train=true")
        for name in ("serial", "process")
    )
    run(serial)
    said = " ".join(capsys.readouterr().out.split())
    assert "6 prompts x 4 completions = 24 of at most 8 tokens a step" in said
    run(process)
    one, other = run_dir(serial), run_dir(process)
    assert_close(metrics_of(one), metrics_of(other))
    for name in ("samples/step_000001.jsonl", "samples/step_000002.jsonl"):
        assert samples_of(one / name) == samples_of(other / name)
        assert len(samples_of(one / name)) == 24
    report = json.loads((one / "eval_step_000002" / "eval.json").read_text())
    assert report["overall"]["n_completions"] == 8
    assert report["meta"]["policy_version"] == 2
    listed = report["completions"]
    assert [(entry["prompt"], entry["policy_version"]) for entry in listed] == [(i, 2) for i in range(8)]
    assert len({entry["prompt_id"] for entry in listed}) == 8
    assert sum(entry["correct"] for entry in listed) == report["overall"]["n_solved"]
    before = json.loads((one / "eval_step_000000" / "eval.json").read_text())["completions"]
    assert [entry["prompt_id"] for entry in before] == [entry["prompt_id"] for entry in listed]
    assert len(samples_of(one / "eval_step_000002" / "samples.jsonl")) == 8
    assert (one / "eval_step_000000" / "eval.json").is_file()
    [first, *_] = metrics_of(one)
    assert {"step", "eval/accuracy", "eval/length", "eval/truncated"} <= first.keys()


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    whole = tiny_math_run(tmp_path / "whole", BY_TEXT, "runner.max_steps=3")
    run(whole)
    run(tiny_math_run(tmp_path / "parts", BY_TEXT, "runner.max_steps=2"))
    rest = tiny_math_run(tmp_path / "parts", BY_TEXT, "runner.max_steps=3", "runner.resume_dir=auto")
    run(rest)
    one, other = run_dir(whole), run_dir(rest)
    assert samples_of(one / "samples/step_000003.jsonl") == samples_of(other / "samples/step_000003.jsonl")
    evaluated = [json.loads((run / "eval_step_000003/eval.json").read_text())["meta"] for run in (one, other)]
    assert evaluated[0] == evaluated[1]
    left = saved_weights(one / "checkpoints/global_step_3")
    right = saved_weights(other / "checkpoints/global_step_3")
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_only_eval_evaluates_a_checkpoint_and_trains_nothing(tmp_path: Path) -> None:
    trained = tiny_math_run(tmp_path, BY_TEXT)
    run(trained)
    before = run_dir(trained)
    run(tiny_math_run(tmp_path, BY_TEXT, "runner.only_eval=true", "runner.resume_dir=auto"))
    [directory] = [path for path in before.parent.iterdir() if path.name.endswith("-eval")]
    first = json.loads((before / "eval_step_000002" / "eval.json").read_text())
    again = json.loads((directory / "eval_step_000002" / "eval.json").read_text())
    assert again["overall"] == first["overall"]
    assert (first["meta"].pop("checkpoint"), again["meta"].pop("checkpoint")) == (None, "global_step_2")
    assert again["meta"] == first["meta"]
    assert samples_of(directory / "eval_step_000002/samples.jsonl") == samples_of(
        before / "eval_step_000002/samples.jsonl"
    )
    assert not (directory / "checkpoints").exists()


@pytest.mark.slow
def test_two_actor_ranks_train_as_one(tmp_path: Path) -> None:
    one = tiny_math_run(tmp_path / "one", BY_TEXT, "actor.micro_batch_size=5")
    two = tiny_math_run(
        tmp_path / "two",
        BY_TEXT,
        "cluster=process",
        "cluster.component_placement.actor=0-1",
        "cluster.component_placement.rollout=0-1",
    )
    run(one)
    run(two)
    assert_close(metrics_of(run_dir(one)), metrics_of(run_dir(two)))
    assert samples_of(run_dir(one) / "samples/step_000002.jsonl") == samples_of(
        run_dir(two) / "samples/step_000002.jsonl"
    )


def test_groups_that_are_filtered_are_drawn_again(tmp_path: Path) -> None:
    config = tiny_math_run(
        tmp_path,
        BY_TEXT,
        "runner.max_steps=1",
        "runner.eval_at_end=false",
        "algorithm.filter_rewards=true",
        "algorithm.rewards_lower_bound=0.5",
        "algorithm.rewards_upper_bound=1.0",
        "algorithm.max_resample_rounds=2",
    )
    run(config)
    [metrics] = metrics_of(run_dir(config))
    assert metrics["rollout/rounds"] > 1
    samples = samples_of(run_dir(config) / "samples/step_000001.jsonl")
    assert len(samples) == metrics["rollout/completions"] == 24 * metrics["rollout/rounds"]


def test_a_step_that_teaches_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_math_run(tmp_path, "runner.max_steps=1", "runner.eval_at_end=false", "reward.success_threshold=2.0"))
    assert "completions got the same score, so the gradient is zero" in " ".join(capsys.readouterr().out.split())


def test_equal_scores_are_no_news_where_something_else_teaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = ("runner.max_steps=1", "runner.eval_at_end=false", "reward.success_threshold=2.0")
    config = tiny_math_run(tmp_path, *one_step, "algorithm.entropy_bonus=0.05")
    run(config)
    [metrics] = metrics_of(run_dir(config))
    assert metrics["actor/groups_equal"] == 1
    assert metrics["actor/grad_norm"] > 0
    assert "gradient is zero" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "values",
    [
        ("algorithm=ppo",),
        ("algorithm=ppo", "critic.enable=true"),
        ("algorithm=ppo", "model.lora.rank=2", "model.lora.modules_to_save=[norm]"),
        ("algorithm=ppo", "critic.enable=true", "model.lora.rank=2"),
    ],
    ids=["head", "critic", "adapters", "critic with adapters"],
)
def test_values_of_a_model_in_bfloat16(tmp_path: Path, values: tuple[str, ...]) -> None:
    always_one = "reward.function=tests.language.rewards.scores:always_one"  # a fresh head says 0
    one_step = ("runner.max_steps=1", "runner.eval_at_end=false", "++model.params.dtype=bfloat16")
    config = tiny_math_run(tmp_path, *one_step, always_one, *values)
    run(config)
    [metrics] = metrics_of(run_dir(config))
    assert max(metrics.get(name, 0) for name in ("actor/value_loss", "critic/value_loss")) > 0


def test_a_workers_user_error_is_the_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected 1 to data.max_prompt_length=2"):
        run(tiny_math_run(tmp_path, "data.max_prompt_length=2"))


CRITIC = ("algorithm=ppo", "critic.enable=true", "critic.optim.lr=0.003", "algorithm.group_size=4")


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
def test_a_critic_of_its_own_learns_and_goes_on_exactly(tmp_path: Path, level: str) -> None:
    """Every completion scores 1, which can be foreseen. The policy waits, until the last step."""
    always_one = "reward.function=tests.language.rewards.scores:always_one"
    recipe = (always_one, *CRITIC, f"algorithm.reward_type={level}", "algorithm.critic_warmup_steps=7")
    whole = tiny_math_run(tmp_path / "whole", *recipe, "runner.max_steps=8", "runner.save_interval=4")
    run(whole)
    for overrides in (["runner.max_steps=4"], ["runner.max_steps=8", "runner.resume_dir=auto"]):
        rest = tiny_math_run(tmp_path / "parts", *recipe, "runner.save_interval=4", *overrides)
        run(rest)
    one, other = run_dir(whole), run_dir(rest)
    losses = [line["actor/value_loss"] for line in metrics_of(one) if "actor/value_loss" in line]
    assert len(losses) == 8
    assert losses[-1] < 0.1 * losses[0]
    newest = "checkpoints/global_step_8"
    first, second = saved_tensors(one / newest), saved_tensors(other / newest)
    assert first.keys() == second.keys()
    assert any(name.startswith("critic.optimizer.") for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
