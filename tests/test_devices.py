"""Whole runs on a stand-in accelerator: what a GPU would refuse it refuses, and the metrics are the CPU's.

Only sharding is left out, which asks for an accelerator of its own kind: one rank has nothing to shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.launch import run
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.registry import policy_class
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import Config
from embodied_rl.workers import actor
from tests.configs import embodied_sft, tiny_math_run, tiny_run
from tests.demonstrations.recording import record
from tests.logged import repeatable
from tests.models.flow.flow_models import POLICIES, A, C, N, flow_policy, look
from tests.stand_in import DEVICE, sharded, stand_in_accelerator

ONE_STEP = "cluster=serial", "runner.max_steps=1", "runner.save_interval=-1"
KL = "algorithm.kl_beta=0.1", "algorithm.kl_in=reward"
IN_AN_ENV = {
    "mlp, all that a decoupled loss can do": (
        *("model=mlp", "algorithm=decoupled_ppo", "algorithm.prox_logp_method=metrics", "algorithm.m2_threshold=0.04"),
        "algorithm.early_stop_imp_ratio=5",
    ),
    "mlp, adapters and the exact divergence": (
        *("model=mlp", "algorithm=ppo", "model.lora.rank=2", *KL, "algorithm.kl_penalty_type=full"),
        "actor.verify_weight_sync=true",
    ),
    "tiny_vla": ("model=tiny_vla", "algorithm=ppo", "env.init_params.image_size=32"),
}
PUBLISHED = {
    "openvla": ("algorithm=ppo", "algorithm.sampling_params.temperature=1.6"),
    "openvla_oft": ("algorithm=ppo", "algorithm.sampling_params.temperature=1.6", "model.lora.rank=2"),
}
ON_TEXT = {
    "ppo": ("algorithm=ppo",),
    "everything": (
        *("algorithm=m2po", "algorithm.prox_logp_method=recompute", "algorithm.importance_sampling_level=sequence"),
        *("algorithm.min_filter_prefix_tokens=1", "algorithm.positive_nll_coef=0.1", "algorithm.entropy_bonus=0.01"),
        *(*KL, "algorithm.kl_ctrl.type=adaptive", "actor.skip_zero_advantages=true"),
        "actor.max_tokens_per_micro_batch=64",
    ),
    "adapters": ("algorithm=grpo", "model.lora.rank=2", "algorithm.kl_beta=0.1", "algorithm.kl_penalty_type=full"),
}


def metrics_of(config: Config) -> dict[str, float]:
    """What is the same in every run."""
    run(config)
    [path] = Path(config.runner.output_dir).glob("*/*/metrics.jsonl")
    [metrics] = [json.loads(line) for line in path.read_text().splitlines()]
    return repeatable(metrics)


def check(monkeypatch: pytest.MonkeyPatch, directory: Path, configure: Callable[[Path], Config]) -> dict[str, float]:
    """Both devices train and evaluate alike; the metrics."""
    expected = metrics_of(configure(directory / "cpu"))
    with stand_in_accelerator(), monkeypatch.context() as patch:
        patch.setattr(Placement, "device", lambda *_: DEVICE)
        patch.setattr(actor, "shard", lambda policy, *_: sharded(policy.to(DEVICE)))
        found = metrics_of(configure(directory / "accelerator"))
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-4)
    assert found["actor/grad_norm"] > 1e-4
    return found


@pytest.mark.parametrize("case", IN_AN_ENV)
def test_a_small_policy_in_an_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    check(monkeypatch, tmp_path, lambda directory: tiny_run(directory, *ONE_STEP, *IN_AN_ENV[case]))


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_model_of_published_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    policy_class(model).write_tiny(tmp_path / "weights")  # pyright: ignore[reportAttributeAccessIssue]
    size = "env.init_params.image_size=64", "env.train.max_episode_steps=4", "env.eval.max_episode_steps=4"
    fast = "env.train.total_num_envs=4", "env.eval.total_num_envs=4", "env.eval.episodes_per_task=1"
    path = f"model={model}", f"model.path={tmp_path / 'weights'}"
    check(
        monkeypatch, tmp_path, lambda directory: tiny_run(directory, *ONE_STEP, *path, *size, *fast, *PUBLISHED[model])
    )


@pytest.mark.parametrize("model", sorted(POLICIES))
@pytest.mark.parametrize("params", [{}, {"stochastic_steps": "all"}, {"noise_method": "flow_noise"}], ids=str)
def test_a_policy_that_denoises(tmp_path: Path, model: str, params: dict[str, Any]) -> None:
    """Its published state and action have sizes that no env of the tests has."""
    POLICIES[model].write_tiny(tmp_path)
    demonstrated = torch.rand(N, C, A, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def results(device: str) -> list[Tensor]:
        policy, obs = flow_policy(model, tmp_path, **params).to(device), look()
        assert isinstance(policy, FlowPolicy)
        seen = replace(
            obs, images={name: image.to(device) for name, image in obs.images.items()}, state=obs.state.to(device)
        )
        generator = torch.Generator(device).manual_seed(3)
        with torch.inference_mode():
            decided = policy.act(seen, greedy=False, temperature=1.0, generator=generator)
            shown = policy.demonstration(seen, demonstrated.to(device), generator)
            values = policy.values(seen)
        # As they travel.
        recorded, shown = ({k: t.cpu().to(device) for k, t in part.items()} for part in (decided.replay_inputs, shown))
        again, imitated = policy(recorded, temperature=1.0), policy(shown, temperature=1.0)
        (again.logprobs.mean() + imitated.logprobs.mean()).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
        found = [decided.actions, decided.logprobs, again.logprobs, again.entropy, imitated.logprobs, values, norm]
        assert {tensor.device.type for tensor in found} == {device}
        return [tensor.detach().cpu() for tensor in found]

    expected = results("cpu")
    with stand_in_accelerator() as device:
        for got, tensor in zip(results(device), expected, strict=True):
            torch.testing.assert_close(got, tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ON_TEXT)
def test_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    reward = "algorithm.group_size=4", "reward.function=tests.language.rewards.scores:by_text"
    check(monkeypatch, tmp_path, lambda directory: tiny_math_run(directory, *ONE_STEP, *ON_TEXT[case], *reward))


def test_imitation_of_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = record(tmp_path / "data", range(0, 256, 32))

    def configure(directory: Path) -> Config:
        return embodied_sft(
            data,
            *ONE_STEP,
            f"runner.output_dir={directory}",
            "env.eval.total_num_envs=4",
            "env.eval.episodes_per_task=1",
            "runner.logger.logger_backends=[jsonl]",
        )

    check(monkeypatch, tmp_path, configure)


def test_imitation_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = "rollout.max_new_tokens=12"
    check(monkeypatch, tmp_path, lambda directory: tiny_math_run(directory, *ONE_STEP, length, task="sft"))
