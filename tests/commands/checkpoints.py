"""Checkpoints without a run."""

from __future__ import annotations

import json
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.checkpoints.shards import save_actor
from embodied_rl.checkpoints.store import STATE_FILE, RunState, begin, checkpoint_dir, publish, seal
from embodied_rl.models.base import Policy
from embodied_rl.schema import FSDPConfig, ModelConfig
from embodied_rl.training.sharding import shard
from tests.configs import config_of
from tests.models.small import shaken


def save(policy: Policy, config: ModelConfig, run: Path, step: int = 3) -> Path:
    """As an actor of one rank does."""
    directory = checkpoint_dir(run, step)
    scratch = begin(directory)
    save_actor(policy, None, scratch)
    PolicyRecord.of(config, policy.spec).write(scratch)
    seal(scratch, RunState(step=step, policy_version=step))
    publish(scratch, directory, max_keep=None)
    return directory


def republish(checkpoint: Path) -> None:
    """Checksums of what it holds now."""
    content, scratch = json.loads((checkpoint / STATE_FILE).read_text()), checkpoint.with_name("again")
    state = RunState(step=content["step"], policy_version=content["policy_version"])
    (checkpoint / STATE_FILE).unlink()
    checkpoint.rename(scratch)
    seal(scratch, state)
    publish(scratch, checkpoint, max_keep=None)


def save_in_ranks(mesh: DeviceMesh, config: ModelConfig, directory: Path) -> None:
    """The shards of one rank."""
    policy = shaken(config)
    shard(policy, mesh, sharding())
    save_actor(policy, None, directory)
    if mesh.get_rank() == 0:
        PolicyRecord.of(config, policy.spec).write(directory)


def sharding() -> FSDPConfig:
    return config_of("env=dummy").actor.fsdp_config
