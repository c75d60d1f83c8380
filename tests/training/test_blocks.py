"""Recomputed and compiled blocks give what plain ones give."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.training.sharding import checkpoint_blocks, compile_blocks, shard
from tests.gathered import full_state_dict
from tests.training.learner import distance, same, trained, training_config
from tests.training.ranks import Ranks
from tests.training.samples import MODELS, decisions, model

CHECKPOINTED = "actor.gradient_checkpointing=true"


def gradients(mesh: DeviceMesh, name: str, *, recompute: bool) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, elements that autograd kept for the backward pass, and forward passes of the first block."""
    policy = model(name).train()
    calls = 0
    block = policy.shard_units()[0]
    original = block.forward

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    block.forward = counted
    if recompute:
        checkpoint_blocks(policy)
    shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        evaluation = policy(dict(decisions(name)), temperature=1.0)
    assert evaluation.values is not None
    (evaluation.logprobs.sum() + evaluation.entropy.sum() + evaluation.values.square().sum()).backward()
    found = {key: p.grad for key, p in policy.named_parameters() if p.grad is not None}
    return found, kept, calls


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_no_bit_and_keeps_less(mesh: DeviceMesh, name: str) -> None:
    plain, kept, calls = gradients(mesh, name, recompute=False)
    recomputed, fewer, more_calls = gradients(mesh, name, recompute=True)
    assert len(plain) == len(list(model(name).parameters()))
    assert same(recomputed, plain)
    assert (calls, more_calls) == (1, 2)
    assert fewer < kept


def test_training_with_recomputation_changes_no_bit(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    for recipe in (("ppo",), ("grpo", "algorithm.kl_beta=0.1")):
        plain = trained(mesh, training_config(*recipe), 2)
        again = trained(mesh, training_config(*recipe, CHECKPOINTED), 2)
        assert same(again["weights"], plain["weights"])
        assert again["metrics"] == plain["metrics"]
    assert same(
        two_ranks.run(trained, training_config("ppo", CHECKPOINTED), 1)[0]["weights"],
        two_ranks.run(trained, training_config("ppo"), 1)[0]["weights"],
    )


def test_names_stay(mesh: DeviceMesh) -> None:
    policy = model("tiny_vla")
    names = list(policy.state_dict())
    checkpoint_blocks(policy)
    shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    assert list(full_state_dict(policy)) == names


class Blockless(Policy):
    """Names no blocks."""


@pytest.mark.parametrize(
    ("function", "key"), [(compile_blocks, "torch_compile"), (checkpoint_blocks, "gradient_checkpointing")]
)
def test_a_model_without_blocks_is_refused(function: Any, key: str) -> None:
    with pytest.raises(UserError, match=f"actor.{key}=true: Blockless names no blocks"):
        function(Blockless())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("name", ["mlp", "tiny_vla"])
def test_compiled_blocks_compute_the_same(mesh: DeviceMesh, name: str) -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        policy = model(name)
        if compiled:
            compile_blocks(policy)
            checkpoint_blocks(policy)
        shard(policy, mesh, training_config("ppo").actor.fsdp_config)
        evaluation = policy(dict(decisions(name)), temperature=1.0)
        (evaluation.logprobs.sum() + evaluation.entropy.sum()).backward()
        found = {key: p.grad for key, p in policy.named_parameters() if p.grad is not None}
        results.append({**found, "logprobs": evaluation.logprobs.detach()})
    assert distance(results[1], results[0]) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_training_with_compiled_blocks(mesh: DeviceMesh) -> None:
    plain = trained(mesh, training_config("ppo"), 2)
    compiled = trained(mesh, training_config("ppo", "actor.torch_compile=true"), 2)
    assert distance(compiled["weights"], plain["weights"]) < 1e-5
