"""Weights that an actor rank lends rollout workers on one CUDA device, by CUDA IPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.channel.base import run_blocking
from embodied_rl.launch import run
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.sharding import TrainingState, init_process_group, shard
from tests.configs import tiny_run
from tests.gathered import full_state_dict
from tests.test_end_to_end import only_run
from tests.training.learner import training_config
from tests.training.rollouts import small_policy
from tests.workers.weight_receivers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield init_process_group(device=DEVICE, rank=0, world_size=1, rendezvous="")
    dist.destroy_process_group()


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_arrive_bit_for_bit(mesh: DeviceMesh, dtype: torch.dtype, offloaded: bool) -> None:
    """A whole version, then what is trained; two receivers on the device verify the checksums of all."""
    workers = Workers("cuda_ipc", dtype, DEVICE)
    policy = small_policy(1).to(DEVICE)
    config = training_config("ppo").actor
    frozen = next(iter(policy.parameters())).requires_grad_(False)
    saved = frozen.numel() * dtype.itemsize
    shard(policy, mesh, config.fsdp_config)
    state = TrainingState([policy], build_optimizer(policy, config.optim), DEVICE)
    sender = workers.sender(policy, verify=True, dtype=dtype)
    try:
        sizes = []
        for version in range(3):
            workers.expect()
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.normal_()
            if offloaded:
                state.leave_device()
            sizes.append(run_blocking(sender.send(version)))
            policy.to(DEVICE)
            whole = {name: tensor.cpu().to(dtype).float() for name, tensor in full_state_dict(policy).items()}
            for held, got in workers.held():
                assert held == version
                assert got.keys() == whole.keys()
                for name, tensor in whole.items():
                    assert torch.equal(torch.from_numpy(got[name]), tensor)
        assert sizes[1] == sizes[2] == sizes[0] - saved
    finally:
        workers.end()


@pytest.mark.parametrize("options", [(), ("rollout.dtype=bfloat16",), ("actor.enable_offload=true",)], ids=str)
def test_a_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    config = tiny_run(
        tmp_path,
        "cluster=process",
        "actor.sync_backend=cuda_ipc",
        "actor.verify_weight_sync=true",
        "cluster.component_placement.actor=0",
        "cluster.component_placement.rollout=0",
        "runner.max_steps=2",
        *options,
    )
    run(config)
    lines = [json.loads(line) for line in (only_run(config) / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("time/sync", 0) > 0 for line in lines) == 2
