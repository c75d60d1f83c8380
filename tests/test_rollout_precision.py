"""Runs whose policies act in fewer bits than the actor trains in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.errors import ConfigError
from embodied_rl.launch import run
from tests.checkpoints.saved import saved_weights
from tests.configs import small_math, tiny_math_run, tiny_run
from tests.test_end_to_end import metrics_of, only_run

CHECKED = ("rollout.dtype=bfloat16", "actor.verify_weight_sync=true", "actor.recompute_logprobs=true")
VLA = (
    "model=tiny_vla",
    "++model.params.hidden_size=32",
    "++model.params.num_layers=2",
    "env.init_params.image_size=32",
)


@pytest.mark.parametrize(
    "options",
    [
        ("cluster=serial",),
        ("cluster=serial", "actor.sync_dtype=bfloat16", "algorithm=ppo", "env.train.auto_reset=true"),
        pytest.param(("cluster=serial", *VLA), marks=pytest.mark.slow),
        pytest.param(("cluster=serial", *VLA, "model.lora.rank=2"), marks=pytest.mark.slow),
        pytest.param(("cluster=process", *VLA, "rollout.max_staleness=1"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_acting_in_bfloat16_and_training_in_float32(tmp_path: Path, options: tuple[str, ...]) -> None:
    config = tiny_run(tmp_path, *options, *CHECKED, "runner.max_steps=2", "runner.save_interval=2")
    run(config)
    steps = [line for line in metrics_of(only_run(config)) if "actor/logprob_gap" in line]
    assert len(steps) == 2
    assert all(1e-6 < line["actor/logprob_gap"] < 0.05 for line in steps)
    weights = saved_weights(only_run(config) / "checkpoints/global_step_2")
    assert {tensor.dtype for tensor in weights.values()} <= {torch.float32, torch.float64, torch.int64}
    assert any(
        (tensor != tensor.bfloat16().float()).any() for tensor in weights.values() if tensor.dtype == torch.float32
    )


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    options = ("cluster=serial", "rollout.dtype=bfloat16", "runner.save_interval=1", "env.eval.total_num_envs=8")
    whole = tiny_run(tmp_path / "a", *options, "runner.max_steps=3")
    run(whole)
    for steps in (1, 3):
        part = tiny_run(tmp_path / "b", *options, f"runner.max_steps={steps}", "runner.resume_dir=auto")
        run(part)
    first, second = (saved_weights(only_run(c) / "checkpoints/global_step_3") for c in (whole, part))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_language_model_may_generate_in_bfloat16(tmp_path: Path) -> None:
    config = tiny_math_run(tmp_path, *CHECKED)
    run(config)
    gaps = [line["actor/logprob_gap"] for line in metrics_of(only_run(config)) if "actor/logprob_gap" in line]
    assert len(gaps) == 2 and all(1e-6 < gap < 0.1 for gap in gaps)


def test_what_travels_is_what_is_acted_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.dtype: got bfloat16 with actor.sync_dtype=float16; leave"):
        tiny_run(tmp_path, "rollout.dtype=bfloat16", "actor.sync_dtype=float16")
    for key in ("rollout.dtype", "actor.sync_dtype"):
        with pytest.raises(ConfigError, match=rf"{key}: got float16 with model.params.dtype=bfloat16"):
            small_math(f"{key}=float16", "++model.params.dtype=bfloat16")
    with pytest.raises(
        ConfigError, match=r"rollout.backend=vllm has a type of its own \(model.params.dtype for vllm\)"
    ):
        small_math("rollout.dtype=bfloat16", "rollout.backend=vllm", "cluster=process")


@pytest.mark.parametrize("ranks", ["0", "0-1"])
def test_a_language_model_is_compared_with_a_reference_in_bfloat16(tmp_path: Path, ranks: str) -> None:
    """Before the first update the policies are one, but for the rounding: a small divergence, and not none."""
    backend = "cluster=serial" if ranks == "0" else "cluster=process"
    options = (backend, f"cluster.component_placement.actor={ranks}", "runner.max_steps=1", "algorithm.kl_beta=0.1")
    config = tiny_math_run(tmp_path, *options, "algorithm.kl_in=reward", "actor.reference_dtype=bfloat16")
    run(config)
    [line] = [line for line in metrics_of(only_run(config)) if "actor/reference_kl" in line]
    assert 1e-9 < line["actor/reference_kl"] < 0.01
