"""Whole runs with tiny checkpoints in the published layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied_rl.launch import run
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from tests.configs import tiny_run


def metrics(directory: Path) -> dict[str, float]:
    [path] = directory.glob("results/*/*/metrics.jsonl")
    return json.loads(path.read_text().splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("openvla_oft", ["algorithm=grpo"]),
        ("openvla_oft", ["algorithm=ppo", "algorithm.n_minibatches=2", "algorithm.update_epoch=1"]),
        (
            "openvla_oft",
            [
                "algorithm=ppo",
                "algorithm.reward_type=action_level",
                "model.lora.rank=4",
                "model.params.use_proprio=false",
            ],
        ),
        ("openvla", ["algorithm=ppo", "algorithm.n_minibatches=1", "env.train.max_episode_steps=4"]),
    ],
)
def test_a_training_step(tmp_path: Path, model: str, overrides: list[str]) -> None:
    {"openvla": OpenVlaPolicy, "openvla_oft": OpenVlaOftPolicy}[model].write_tiny(tmp_path / "weights")
    config = tiny_run(
        tmp_path,
        f"model={model}",
        f"model.path={tmp_path / 'weights'}",
        "cluster=serial",
        "env.init_params.image_size=64",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
        "algorithm.sampling_params.temperature=1.6",
        *overrides,
    )
    run(config)
    found = metrics(tmp_path)
    assert found["actor/grad_norm"] > 0
    assert found["actor/optimizer_steps"] >= 1
    if "algorithm=ppo" in overrides:
        assert found["actor/value_loss"] > 0
