"""Every preset trains a policy in an env and a language model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from embodied_rl.launch import run
from embodied_rl.schema import Config
from tests.configs import tiny_math_run, tiny_run

REPLAYING = ("rlpd", "sac")
OTHERS = ("base", "sft", *REPLAYING)
PRESETS = sorted(path.stem for path in Path("config/algorithm").glob("*.yaml") if path.stem not in OTHERS)
SAID = ("ratio", "ratio_max", "approx_kl", "entropy", "policy_loss", "grad_norm", "advantage_mean", "advantage_std")
"""What every update says of itself."""
FULL_KL = "algorithm.kl_beta=0.05", "algorithm.kl_penalty_type=full", "algorithm.n_minibatches=1"


def test_the_presets_are_the_published_algorithms() -> None:
    names = ["ppo", "grpo", "dapo", "drgrpo", "rloo", "reinforce_pp", "gspo", "aipo", "decoupled_ppo", "m2po"]
    assert sorted(names) == PRESETS


def in_an_env(directory: Path, *overrides: str) -> Config:
    """Goals of a size that some reach and some do not."""
    config = tiny_run(directory, *SHORT, *overrides)
    params = {"success_radius": 0.6, "step_size": 0.3}
    return replace(config, env=replace(config.env, init_params=params))


def on_a_text(directory: Path, *overrides: str) -> Config:
    return tiny_math_run(directory, *SHORT, "reward.function=tests.language.rewards.scores:by_text", *overrides)


SHORT = "cluster=serial", "runner.max_steps=2", "runner.eval_at_end=false", "runner.save_interval=-1"
TASKS = {"embodied": in_an_env, "math": on_a_text}


def metrics_of(config: Config) -> list[dict[str, float]]:
    run(config)
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_a_preset_trains(tmp_path: Path, task: str, preset: str) -> None:
    steps = metrics_of(TASKS[task](tmp_path, f"algorithm={preset}", "algorithm.group_size=4"))
    assert len(steps) == 2
    for metrics in steps:
        numbers = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        assert numbers.keys() >= set(SAID)
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert numbers["optimizer_steps"] > 0
        assert numbers["grad_norm"] > 1e-6
        assert 0 <= numbers["groups_filtered"] < 1
        if preset == "ppo":
            assert numbers.keys() >= {"explained_variance", "return_mean", "return_std", "value_loss"}


@pytest.mark.parametrize("preset", REPLAYING)
def test_a_preset_with_a_buffer_trains(tmp_path: Path, preset: str) -> None:
    """Without demonstrations rlpd is SAC with its ensemble."""
    few = (
        "algorithm.replay.update_to_data=0.2",
        "algorithm.replay.learning_starts=0",
        "algorithm.sac.policy_interval=2",
    )
    for metrics in metrics_of(in_an_env(tmp_path, f"algorithm={preset}", "model=sac_mlp", *few)):
        numbers = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert min(numbers[name] for name in ("updates", "critic_loss", "grad_norm", "critic_grad_norm", "q_std")) > 0
        assert numbers.keys() >= {"policy_loss", "entropy", "temperature", "q_mean", "buffer_chunks"}


@pytest.mark.parametrize("task", TASKS)
def test_the_exact_divergence_for_continuous_and_for_discrete_actions(tmp_path: Path, task: str) -> None:
    first, second = metrics_of(TASKS[task](tmp_path, *FULL_KL, "algorithm.group_size=4"))
    assert first["actor/reference_kl"] == pytest.approx(0.0, abs=1e-5), "the run starts from the reference"
    assert second["actor/reference_kl"] > 1e-6


@pytest.mark.parametrize("task", TASKS)
def test_with_adapters(tmp_path: Path, task: str) -> None:
    adapters = "model.lora.rank=4", "actor.optim.lr=0.01"
    first, second = metrics_of(TASKS[task](tmp_path, *FULL_KL, *adapters, "algorithm.group_size=4"))
    assert first["actor/reference_kl"] == pytest.approx(0.0, abs=1e-5), "the base is the reference"
    assert second["actor/reference_kl"] > 1e-6


def test_everything_at_once_on_a_language_model(tmp_path: Path) -> None:
    steps = metrics_of(
        on_a_text(
            tmp_path,
            "algorithm=decoupled_ppo",
            "algorithm.group_size=4",
            "algorithm.prox_logp_method=metrics",
            "algorithm.m2_threshold=0.04",
            "algorithm.importance_sampling_level=sequence",
            "algorithm.loss_agg_func=seq-mean-token-sum-norm",
            "algorithm.positive_nll_coef=0.1",
            "algorithm.min_filter_prefix_tokens=1",
            "algorithm.entropy_bonus=0.01",
            "algorithm.kl_beta=0.1",
            "algorithm.kl_in=reward",
            "algorithm.kl_penalty_type=k1",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.early_stop_imp_ratio=5",
        )
    )
    for metrics in steps:
        assert metrics["actor/behaviour_weight"] == pytest.approx(1.0, abs=1e-3), "generated and trained alike"
        assert metrics["actor/logprob_gap_max"] < 1e-4
        assert 0 < metrics["actor/prefix_masked"] < 1
        assert metrics["actor/nll"] > 0
    assert steps[0]["actor/kl_beta"] != steps[1]["actor/kl_beta"]
