"""Whole runs of ``task=embodied_sft``: from recorded episodes to success, and on with reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.models.base import ActionStatistics
from embodied_rl.models.categorical import bin_range
from embodied_rl.schema import EmbodiedConfig, EmbodiedSftConfig
from tests.checkpoints.saved import saved_weights
from tests.configs import embodied_sft, tiny_run
from tests.demonstrations.recording import record
from tests.logged import accounted

HELD_OUT = 4
"""Of each task's 64 initial states, the first: those that evaluations play."""


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    states = [state for state in range(256) if state % 64 >= HELD_OUT]
    return record(tmp_path_factory.mktemp("data"), states)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With steps so wide that no action is as large as one can be."""
    return record(tmp_path_factory.mktemp("pictures"), range(10, 256, 16), image_size=32, step_size=2.0)


def quick(directory: Path, data: Path, *overrides: str) -> EmbodiedSftConfig:
    """A run of seconds that writes below ``directory`` only."""
    return embodied_sft(
        data,
        f"runner.output_dir={directory / 'results'}",
        f"env.eval.video_cfg.video_base_dir={directory / 'videos'}",
        "env.eval.total_num_envs=16",
        f"env.eval.episodes_per_task={HELD_OUT}",
        "runner.logger.logger_backends=[jsonl]",
        *overrides,
    )


def run_dir(config: EmbodiedConfig) -> Path:
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return directory


def success(config: EmbodiedConfig, step: int) -> float:
    content = json.loads((run_dir(config) / f"eval_step_{step:06d}" / "eval.json").read_text())
    return content["overall"]["pc_success"] / 100


@pytest.mark.slow
def test_imitation_reaches_goals_that_were_never_shown(tmp_path: Path, demonstrations: Path) -> None:
    config = quick(
        tmp_path,
        demonstrations,
        "cluster=serial",
        "data.batch_size=512",
        "actor.global_batch_size=128",
        "actor.optim.lr=3e-3",
        "runner.max_steps=30",
        "runner.val_before_train=true",
        "runner.val_check_interval=15",
        "runner.save_interval=-1",
        "env.eval.video_cfg.save_video=true",
    )
    run(config)
    assert success(config, 0) <= 0.1
    assert success(config, 30) >= 0.8
    lines = [json.loads(line) for line in (run_dir(config) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["actor/policy_loss"] for line in lines if "actor/policy_loss" in line]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.5
    steps = [line for line in lines if "data/epoch" in line]
    assert [line["actor/optimizer_steps"] for line in steps] == [4.0] * 30
    assert all(line["data/samples"] == 512 and line["time/data"] > 0 for line in steps)
    rates = [line["actor/learning_rate"] for line in steps]
    assert max(rates) == 3e-3
    assert rates[-1] < 1e-4
    assert list((tmp_path / "videos").rglob("*.mp4")), "evaluations make videos"


def test_more_episodes_than_initial_states_are_refused_before_training(tmp_path: Path, demonstrations: Path) -> None:
    config = quick(tmp_path, demonstrations, "cluster=serial", "runner.max_steps=1", "env.eval.episodes_per_task=65")
    with pytest.raises(UserError, match=r"env\.eval\.episodes_per_task: got 65, expected 1 to 64"):
        run(config)
    assert not (run_dir(config) / "metrics.jsonl").read_text()


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, demonstrations: Path) -> None:
    options = ("cluster=serial", "data.batch_size=96", "actor.global_batch_size=32", "runner.eval_at_end=false")
    options += ("runner.val_check_interval=-1", "runner.save_interval=2", "actor.lr_sched.lr_decay_iters=6")
    whole = quick(tmp_path / "a", demonstrations, *options, "runner.max_steps=6")
    run(whole)
    for steps in (2, 6):
        part = quick(tmp_path / "b", demonstrations, *options, f"runner.max_steps={steps}", "runner.resume_dir=auto")
        run(part)
    assert all("gap/data" in step for step in accounted(run_dir(whole)))
    first = saved_weights(run_dir(whole) / "checkpoints/global_step_6")
    second = saved_weights(run_dir(part) / "checkpoints/global_step_6")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_two_actor_ranks_train_as_one_does(tmp_path: Path, demonstrations: Path) -> None:
    options = ("data.batch_size=64", "actor.global_batch_size=32", "runner.max_steps=2", "runner.save_interval=2")
    options += ("actor.optim.adam_eps=1e-3", "runner.eval_at_end=false", "runner.val_check_interval=-1")
    one = quick(tmp_path / "a", demonstrations, *options, "cluster=serial")
    two = quick(
        tmp_path / "b",
        demonstrations,
        *options,
        "cluster=process",
        "cluster.component_placement={actor: 0-1, rollout: 0, env: 0}",
    )
    run(one)
    run(two)
    first, second = (
        saved_weights(run_dir(config) / "checkpoints/global_step_2") for name, config in (("a", one), ("b", two))
    )
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_reinforcement_learning_goes_on_from_it(tmp_path: Path, pictures: Path, algorithm: str) -> None:
    model = ("model=tiny_vla", "++model.params.hidden_size=32", "cluster=serial")
    model += ("env.init_params.image_size=32", "env.init_params.step_size=2.0")
    sft = quick(
        tmp_path,
        pictures,
        *model,
        "data.batch_size=32",
        "actor.global_batch_size=16",
        "runner.max_steps=2",
        "runner.save_interval=2",
        "runner.experiment_name=sft",
    )
    run(sft)
    saved = saved_weights(run_dir(sft) / "checkpoints/global_step_2")
    low, high = bin_range(ActionStatistics(**Demonstrations(pictures, chunk=8).action_statistics))  # type: ignore[arg-type]
    assert torch.equal(saved["action_low"], low)
    assert torch.equal(saved["action_high"], high)
    assert low.min() > -1.0
    assert high.max() < 1.0
    rl = tiny_run(
        tmp_path,
        *model,
        f"algorithm={algorithm}",
        *(["algorithm.group_size=2"] if algorithm == "grpo" else []),
        "env.eval.total_num_envs=16",
        f"env.eval.episodes_per_task={HELD_OUT}",
        "env.eval.max_episode_steps=32",
        f"runner.init_from={run_dir(sft)}",
        "runner.experiment_name=rl",
        "runner.max_steps=1",
        "runner.val_before_train=true",
        "runner.save_interval=1",
        "runner.eval_at_end=false",
        "actor.optim.lr=1e-30",
    )
    run(rl)
    after = saved_weights(run_dir(rl) / "checkpoints/global_step_1")
    assert all(torch.allclose(tensor, after[name], rtol=0.0, atol=1e-12) for name, tensor in saved.items())
    assert any(name.startswith("value_head.") for name in after) == (algorithm == "ppo")
    assert success(rl, 0) == success(sft, 2)


def test_only_eval_plays_what_was_trained_and_reads_no_demonstrations(tmp_path: Path, demonstrations: Path) -> None:
    options = ("cluster=serial", "data.batch_size=32", "runner.max_steps=1", "runner.val_check_interval=-1")
    trained = quick(tmp_path, demonstrations, *options)
    run(trained)
    first = run_dir(trained)
    again = quick(tmp_path, Path("/nowhere"), *options, "runner.only_eval=true", "runner.resume_dir=auto")
    run(again)
    [second] = [path for path in first.parent.iterdir() if path != first]
    tables = [json.loads((path / "eval_step_000001" / "eval.json").read_text()) for path in (first, second)]
    assert tables[0]["overall"] == tables[1]["overall"]
    assert tables[1]["meta"]["checkpoint"] == "global_step_1"
