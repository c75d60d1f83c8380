"""What the training engine does on a CUDA device: one rank, NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.host import HostWeights
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.training.micro_batch import MicroBatch
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.sharding import TrainingState, checkpoint_blocks, compile_blocks, init_process_group, shard
from tests.gathered import full_state_dict
from tests.training.learner import distance, same, training_config
from tests.training.samples import MODELS, decisions, model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
FSDP = "actor.fsdp_config"
BF16 = f"{FSDP}.mixed_precision.param_dtype=bfloat16"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield init_process_group(device="cuda:0", rank=0, world_size=1, rendezvous="")
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would round float32 to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def equipped(mesh: DeviceMesh, name: str, *overrides: str) -> tuple[Policy, Optimizer]:
    actor = training_config("ppo", *overrides).actor
    policy = model(name).to("cuda").train()
    if actor.torch_compile:
        compile_blocks(policy)
    if actor.gradient_checkpointing:
        checkpoint_blocks(policy)
    shard(policy, mesh, actor.fsdp_config)
    return policy, build_optimizer(policy, actor.optim)


def stepped(policy: Policy, optimizer: Optimizer, name: str, steps: int = 3) -> list[Tensor]:
    """Optimiser steps on one batch; the gradient's norm at each."""
    inputs = {key: tensor.to("cuda") for key, tensor in decisions(name).items()}
    norms = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        evaluation = policy(inputs, temperature=1.0)
        assert evaluation.values is not None
        assert evaluation.logprobs.dtype == evaluation.values.dtype == torch.float32
        (-evaluation.logprobs.mean() + evaluation.values.square().mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu())
        optimizer.step()
    return norms


def trained(mesh: DeviceMesh, name: str, *overrides: str) -> dict[str, Tensor]:
    policy, optimizer = equipped(mesh, name, *overrides)
    assert all(norm.isfinite() and norm > 0 for norm in stepped(policy, optimizer, name))
    return full_state_dict(policy)


def on_the_cpu(name: str) -> dict[str, Tensor]:
    """The same three steps without FSDP."""
    policy = model(name).train()
    optimizer = build_optimizer(policy, training_config("ppo").actor.optim)
    inputs = dict(decisions(name))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        evaluation = policy(inputs, temperature=1.0)
        assert evaluation.values is not None
        (-evaluation.logprobs.mean() + evaluation.values.square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return {key: tensor.detach() for key, tensor in policy.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_float32_trains_as_on_the_cpu(mesh: DeviceMesh, name: str) -> None:
    expected = on_the_cpu(name)
    got = trained(mesh, name)
    assert distance(got, expected) < 1e-4
    assert distance(expected, dict(model(name).state_dict())) > 1e-3


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid_shard"])
def test_replicas_train_alike(mesh: DeviceMesh, strategy: str) -> None:
    group = [f"{FSDP}.fsdp_size=1"] if strategy == "hybrid_shard" else []
    got = trained(mesh, "tiny_vla", f"{FSDP}.sharding_strategy={strategy}", *group)
    assert distance(got, trained(mesh, "tiny_vla")) < 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_stays_close(mesh: DeviceMesh, name: str) -> None:
    exact, rounded = trained(mesh, name), trained(mesh, name, BF16)
    assert {tensor.dtype for tensor in rounded.values()} == {torch.float32}
    assert 0 < distance(rounded, exact) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_parameters_train_alike(mesh: DeviceMesh, name: str) -> None:
    policy, optimizer = equipped(mesh, name, f"{FSDP}.cpu_offload=true")
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    stepped(policy, optimizer, name)
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    moments = [v for state in optimizer.state.values() for v in state.values()]
    assert {v.device.type for v in moments} == {"cpu"}
    assert distance(full_state_dict(policy), trained(mesh, name)) < 1e-5


def test_an_offloaded_checkpoint_is_loaded_without_offload(mesh: DeviceMesh, tmp_path: Path) -> None:
    policy, optimizer = equipped(mesh, "mlp", f"{FSDP}.cpu_offload=true")
    stepped(policy, optimizer, "mlp")
    save_actor(policy, optimizer, tmp_path)
    other, its_optimizer = equipped(mesh, "mlp")
    load_actor(other, its_optimizer, tmp_path)
    assert same(full_state_dict(other), full_state_dict(policy))
    for each, its in ((policy, optimizer), (other, its_optimizer)):
        stepped(each, its, "mlp", steps=1)
    assert distance(full_state_dict(other), full_state_dict(policy)) < 1e-6


@pytest.mark.parametrize("options", [[], ["actor.gradient_checkpointing=true"], [BF16]], ids=["plain", "ac", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_blocks_train_alike(mesh: DeviceMesh, name: str, options: list[str]) -> None:
    torch._dynamo.reset()
    got = trained(mesh, name, "actor.torch_compile=true", *options)
    assert distance(got, trained(mesh, name, *options)) < (0.02 if BF16 in options else 1e-4)


def peak_memory(mesh: DeviceMesh, *overrides: str) -> int:
    """Bytes above what the model takes, in a forward and backward pass of a large batch."""
    policy, _ = equipped(mesh, "tiny_vla", *overrides)
    inputs = {key: tensor.to("cuda") for key, tensor in decisions("tiny_vla", 512).items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy(inputs, temperature=1.0).logprobs.mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_recomputation_needs_less_memory(mesh: DeviceMesh) -> None:
    option = "actor.gradient_checkpointing=true"
    assert peak_memory(mesh, option) < peak_memory(mesh)
    assert distance(trained(mesh, "tiny_vla", option), trained(mesh, "tiny_vla")) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_after_its_state_was_in_host_memory(mesh: DeviceMesh, name: str) -> None:
    policy, optimizer = equipped(mesh, name)
    other, beside = equipped(mesh, name)
    state = TrainingState([other], beside, "cuda:0")
    for _ in range(2):
        stepped(policy, optimizer, name, steps=1)
        with state.on_device(PhaseTimer()):
            stepped(other, beside, name, steps=1)
        assert {parameter.device.type for parameter in other.parameters()} == {"cpu"}
        assert {
            value.device.type
            for entry in beside.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        } == {"cpu"}
    assert same(full_state_dict(other), full_state_dict(policy))


@pytest.mark.parametrize("parts", [["weights"], ["gradients"], ["optimizer"]], ids=str)
def test_parts_of_the_state_leave_the_device_apart(mesh: DeviceMesh, parts: list[str]) -> None:
    policy, optimizer = equipped(mesh, "tiny_vla")
    other, beside = equipped(mesh, "tiny_vla")
    state = TrainingState([other], beside, "cuda:0", parts)
    for _ in range(2):
        stepped(policy, optimizer, "tiny_vla", steps=1)
        with state.on_device(PhaseTimer()):
            stepped(other, beside, "tiny_vla", steps=1)
            held = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() < held
        assert {p.device.type for p in other.parameters()} == {"cpu" if "weights" in parts else "cuda"}
        moments = {entry["exp_avg"].device.type for entry in beside.state.values()}
        assert moments == {"cpu" if "optimizer" in parts else "cuda"}
    assert same(full_state_dict(other), full_state_dict(policy))


@pytest.mark.parametrize("name", MODELS)
def test_a_rollouts_weights_wait_in_host_memory(name: str) -> None:
    policy = model(name)
    host = HostWeights(policy, "cuda:0")
    received = policy.state_dict()
    host.load()
    assert {parameter.device.type for parameter in policy.parameters()} == {"cuda"}
    host.drop()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for tensor in received.values():
            tensor.fill_(0.25)
    host.load()
    assert all((parameter == 0.25).all() for parameter in policy.parameters())
    host.drop()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")
def test_where_memory_runs_out_half_the_samples_are_tried(mesh: DeviceMesh) -> None:
    policy, _ = equipped(mesh, "tiny_vla")
    inputs = {key: tensor.to("cuda") for key, tensor in decisions("tiny_vla", 512).items()}
    said: list[str] = []
    micro_batch = MicroBatch("auto", policy, say=said.append)

    def one(rows: Tensor) -> None:
        micro = {key: tensor[rows.to("cuda")] for key, tensor in inputs.items()}
        policy(micro, temperature=1.0).logprobs.mean().backward()

    def all_of(parts: list[Tensor]) -> list[int]:
        for part in parts:
            micro_batch.attempt(one, part)
        return [len(part) for part in parts]

    assert micro_batch.run(512, None, all_of) == [512]
    policy.zero_grad(set_to_none=True)
    held, needed = torch.cuda.memory_allocated(), peak_memory(mesh)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held + 0.6 * needed) / total)
    try:
        parts = micro_batch.run(512, None, all_of)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sum(parts) == 512 and max(parts) == micro_batch.fitting != 512
    assert said[0].startswith("out of memory with 512 samples at once, 256 from now on")
