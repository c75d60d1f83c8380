"""What whole runs say of their work, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.launch import run
from tests.configs import tiny_math_run, tiny_run
from tests.logged import accounted

TERA = 1e12


def logged(config: Any) -> list[dict[str, float]]:
    run(config)
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    return accounted(directory)


@pytest.mark.parametrize("rollout_epochs", [1, 2])
def test_a_simulator_run_logs_the_operations_of_its_mlp(tmp_path: Path, rollout_epochs: int) -> None:
    """16 envs, 4 chunks of 4 steps: actions from a state of 4 numbers, 2 layers of 32 and 8 numbers; no value head."""
    steps = logged(
        tiny_run(
            tmp_path,
            "algorithm=grpo",
            "cluster=serial",
            "model=mlp",
            "model.num_action_chunks=4",
            "model.params.hidden_size=32",
            "model.params.num_layers=2",
            "algorithm.group_size=4",
            f"algorithm.rollout_epoch={rollout_epochs}",
            "algorithm.update_epoch=3",
            "actor.skip_zero_advantages=false",
            "actor.recompute_logprobs=true",
            "runner.max_steps=2",
            "runner.eval_at_end=false",
            "runner.save_interval=-1",
        )
    )
    assert all("gap/answers" in step and step["cpu/env"] > 0 for step in steps)
    forward = 2 * (4 * 32 + 32 * 32 + 32 * 8)
    acted = rollout_epochs * 16 * 4
    for step in steps:
        assert step["perf/rollout_tflops"] * step["time/inference"] == pytest.approx(acted * forward / TERA)
        scored = sum(step.get(f"perf/{p}_tflops", 0) * step.get(f"time/{p}", 0) for p in PHASES) * TERA / forward
        assert scored == pytest.approx(step["actor/samples"])
        # The first layer's input has no gradient; every sample goes through three times.
        trained = 3 * step["actor/samples"] * (3 * forward - 2 * 4 * 32)
        assert step["perf/update_tflops"] * step["time/update"] == pytest.approx(trained / TERA)
        assert not any(name.endswith("fu") for name in step), "nobody knows this processor's peak"


PHASES = ("scoring", "scoring_ahead")


@pytest.mark.parametrize("workers", ["0", "0-1"])
def test_a_language_run_logs_the_operations_of_its_tokens(tmp_path: Path, workers: str) -> None:
    """Texts of known lengths in the run's own record of them: 6 prompts of 4 completions."""
    config = tiny_math_run(
        tmp_path,
        f"cluster.component_placement.rollout={workers}",
        "actor.skip_zero_advantages=false",
        "algorithm.update_epoch=2",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
    )
    [step] = logged(config)
    [directory] = (Path(config.runner.output_dir) / config.runner.experiment_name).iterdir()
    samples = [json.loads(line) for line in (directory / "samples" / "step_000001.jsonl").read_text().splitlines()]
    width, inner, layers, vocabulary = 32, 64, 2, 3 + 50

    def forward(prompt: int, response: int) -> float:
        """Keys and values have as many heads as queries."""
        tokens = prompt + response
        block = 2 * tokens * (4 * width**2 + 3 * width * inner) + 4 * tokens**2 * width
        return layers * block + 2 * (response + 1) * width * vocabulary

    assert len(samples) == 24
    whole = sum(forward(len(sample["prompt"]), sample["length"]) for sample in samples)
    again = sum(forward(len(sample["prompt"]), 0) for index, sample in enumerate(samples) if index % 4)
    assert step["perf/rollout_tflops"] * step["time/generate"] == pytest.approx((whole - again) / TERA)
    assert step["perf/update_tflops"] * step["time/update"] == pytest.approx(2 * 3 * whole / TERA)


def test_each_group_logs_its_largest_memory(tmp_path: Path) -> None:
    """A process with torch holds hundreds of MiB; the actor has 4 tensors of each of its 16.8 million weights."""
    [step] = logged(
        tiny_run(
            tmp_path,
            "algorithm=ppo",
            "cluster=process",
            "model=mlp",
            "model.params.hidden_size=2048",
            "model.params.num_layers=3",
            "runner.max_steps=1",
            "runner.eval_at_end=false",
            "runner.save_interval=-1",
        )
    )
    memory = {name.removeprefix("memory/"): value for name, value in step.items() if name.startswith("memory/")}
    assert step["cpu/env"] > 0
    assert memory.keys() == {"driver_gb", "env_gb", "rollout_gb", "update_gb"}
    weights = 2 * 2 * 2048**2 * 4 / 2**30  # of policy and value head
    assert 0.1 < memory["env_gb"] < 1.0
    assert memory["rollout_gb"] - memory["env_gb"] > 0.8 * weights
    assert memory["update_gb"] - memory["env_gb"] > 0.8 * 4 * weights
