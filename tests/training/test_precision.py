"""Mixed precision: parameters are computed with in few bits, everything that enters the loss in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.models.weights.precision import want_in
from embodied_rl.training.scoring import Reference
from embodied_rl.training.sharding import shard
from tests.training.learner import Learner, distance, trained, training_config, two_epochs
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy
from tests.training.samples import MODELS, decisions, model

PARAM = "actor.fsdp_config.mixed_precision.param_dtype"
REDUCE = "actor.fsdp_config.mixed_precision.reduce_dtype"


def sharded(mesh: DeviceMesh, name: str, dtype: str) -> Policy:
    policy = model(name)
    shard(policy, mesh, training_config("ppo", f"{PARAM}={dtype}").actor.fsdp_config)
    return policy


def computed_in(policy: Policy, inputs: dict[str, Tensor]) -> set[torch.dtype]:
    """Types of what linear layers give."""
    seen: set[torch.dtype] = set()
    for module in policy.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    policy(inputs, temperature=1.0)
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_network_alone_is_computed_in_few_bits(mesh: DeviceMesh, name: str, dtype: str) -> None:
    policy, inputs = sharded(mesh, name, dtype), dict(decisions(name))
    whole = model(name)
    with torch.no_grad():
        expected = whole(inputs, temperature=0.7, with_distribution=True)
        got = policy(inputs, temperature=0.7, with_distribution=True)
    for tensor in (got.logprobs, got.entropy, got.values, *got.distribution.values()):
        assert tensor.dtype == torch.float32
    gap = (got.logprobs - expected.logprobs).abs().mean()
    assert 0 < gap < 0.05
    if name == "mlp":
        # The recorded sample and the deviation are exact: in bfloat16 either would be off by up to 0.4 %.
        normal = torch.distributions.Normal(got.distribution["loc"], got.distribution["scale"])
        torch.testing.assert_close(got.logprobs, normal.log_prob(inputs["samples"]), rtol=0, atol=1e-5)
        assert torch.equal(got.distribution["scale"], expected.distribution["scale"])
    else:
        logits = got.distribution["logits"][:, :1]  # a completion has one token at least; what follows is padding
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(logits.shape[:-1]), rtol=0, atol=1e-5)
    assert computed_in(policy, inputs) == {getattr(torch, dtype)}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_records_are_not_rounded_even_where_all_parameters_are(mesh: DeviceMesh) -> None:
    policy = model("mlp")
    policy.float32_root = False  # type: ignore[misc]
    shard(policy, mesh, training_config("ppo", f"{PARAM}=bfloat16").actor.fsdp_config)
    evaluate, seen = policy.evaluate, []

    def evaluated(replay_inputs: Mapping[str, Tensor], **options: Any) -> Evaluation:
        seen.extend(tensor.dtype for tensor in replay_inputs.values())
        return evaluate(replay_inputs, **options)

    policy.evaluate = evaluated  # type: ignore[method-assign]
    policy(dict(decisions("mlp")), temperature=1.0)
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float16", 5e-3)])
def test_training_stays_close_to_float32(mesh: DeviceMesh, two_ranks: Ranks, dtype: str, limit: float) -> None:
    exact = trained(mesh, training_config("ppo"), 2)
    rounded = trained(mesh, training_config("ppo", f"{PARAM}={dtype}"), 2)
    assert rounded["metrics"]["optimizer_steps"] == 4
    assert 0 < distance(rounded["weights"], exact["weights"]) < limit
    first, second = two_ranks.run(trained, training_config("ppo", f"{PARAM}={dtype}", f"{REDUCE}={dtype}"), 2)
    assert first["metrics"] == second["metrics"]
    assert 0 < distance(first["weights"], exact["weights"]) < limit
    assert {tensor.dtype for tensor in first["weights"].values()} == {torch.float32}


def test_few_bits_are_accumulated_in_float32(mesh: DeviceMesh) -> None:
    """Gradients of many micro-batches add up without the sum's small terms being lost."""
    one, many = (
        trained(mesh, training_config("ppo", f"{PARAM}=bfloat16", f"actor.micro_batch_size={size}"), 1)["weights"]
        for size in (1, 10_000)
    )
    lossy = trained(
        mesh, training_config("ppo", f"{PARAM}=bfloat16", f"{REDUCE}=bfloat16", "actor.micro_batch_size=1"), 1
    )
    assert distance(one, many) < distance(lossy["weights"], many)


def gradient_norm(mesh: DeviceMesh, scale: float, *recipe: str) -> float:
    """Of a loss that is multiplied by ``scale``."""
    learner = Learner(
        mesh,
        training_config("grpo", f"{PARAM}=float16", "algorithm.update_epoch=1", "algorithm.n_minibatches=1", *recipe),
    )
    batch = learner.batch(two_epochs(learner.config))
    batch.advantages.mul_(scale)
    return learner.updater.run(batch, step=0)["grad_norm"]


def test_float16_neither_underflows_nor_overflows(mesh: DeviceMesh) -> None:
    usual = gradient_norm(mesh, 1.0)
    assert usual > 0
    for scale in (2.0**-20, 2.0**12):
        assert gradient_norm(mesh, scale) == pytest.approx(scale * usual, rel=0.02), scale
    assert math.isfinite(usual)


def sharded_reference(mesh: DeviceMesh, dtype: str) -> tuple[list[int], Tensor]:
    """Bytes of this rank's shards, and what the sharded reference says."""
    policy = small_policy().requires_grad_(False)
    if dtype != "float32":
        want_in(policy, getattr(torch, dtype))
    config = training_config("grpo")
    shard(policy, mesh, config.actor.fsdp_config)
    own = [p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in policy.parameters()]
    trajectory = two_epochs(config)[0]
    inputs = {name: tensor.flatten(0, 1) for name, tensor in trajectory.replay_inputs.items()}
    return own, Reference(policy)(inputs, temperature=1.0).logprobs


def test_a_rounded_reference_is_sharded(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    whole, exact = sharded_reference(mesh, "float32")
    one, alone = sharded_reference(mesh, "bfloat16")
    assert sum(one) < 0.6 * sum(whole)
    for own, together in two_ranks.run(sharded_reference, "bfloat16"):
        assert sum(own) < 0.6 * sum(one)
        assert torch.allclose(together, alone, atol=1e-6)
    assert 0 < (alone - exact).abs().max() < 0.1
