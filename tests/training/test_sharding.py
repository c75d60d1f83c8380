"""Sharding modes and gradient accumulation train like plain PyTorch."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.errors import UserError
from embodied_rl.schema import Config
from tests.training.learner import Learner, distance, same, trained, training_config, two_epochs
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy
from tests.training.test_update import SMALLEST_MOVE, plain_training

FSDP = "actor.fsdp_config"
MODES = {
    "full": (),
    "full_kept": (f"{FSDP}.reshard_after_forward=false",),
    "every_pass": (f"{FSDP}.enable_gradient_accumulation=false",),
    "none": (f"{FSDP}.sharding_strategy=no_shard",),
    "none_every_pass": (f"{FSDP}.sharding_strategy=no_shard", f"{FSDP}.enable_gradient_accumulation=false"),
}
THREE_STEPS = (
    "ppo",
    "algorithm.update_epoch=3",
    "algorithm.n_minibatches=1",
    "algorithm.entropy_bonus=0.01",
    "actor.optim.weight_decay=0.1",
    "actor.optim.clip_grad=0.05",
    "actor.micro_batch_size=7",
)


def hybrid(group: int, ranks: int = 2) -> tuple[str, ...]:
    return (
        f"{FSDP}.sharding_strategy=hybrid_shard",
        f"{FSDP}.fsdp_size={group}",
        "cluster=process",
        f"cluster.component_placement.actor=0-{ranks - 1}",
    )


def config_of_mode(*mode: str) -> Config:
    return training_config(*THREE_STEPS, *mode)


def plain(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    config = training_config(*THREE_STEPS)
    return plain_training(config, Learner(mesh, config).batch(two_epochs(config)))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_three_steps_of_one_rank_are_those_of_plain_pytorch(mesh: DeviceMesh, mode: tuple[str, ...]) -> None:
    got = trained(mesh, config_of_mode(*mode), 1)
    assert got["metrics"]["optimizer_steps"] == 3
    assert distance(got["weights"], plain(mesh)) < 1e-6
    assert distance(got["weights"], small_policy(1).state_dict()) > SMALLEST_MOVE


def test_a_cpu_alone_keeps_a_float32_policy_as_it_is(mesh: DeviceMesh) -> None:
    assert not isinstance(Learner(mesh, config_of_mode()).policy, FSDPModule)
    for option in ("reduce_dtype", "param_dtype"):
        casting = config_of_mode(f"{FSDP}.mixed_precision.{option}=bfloat16")
        assert isinstance(Learner(mesh, casting).policy, FSDPModule), "which does the casting"


TWO_RANKS = {**MODES, "hybrid_of_1": hybrid(1), "hybrid_of_2": hybrid(2)}


@pytest.mark.parametrize("mode", TWO_RANKS.values(), ids=TWO_RANKS)
def test_three_steps_of_two_ranks_are_those_of_plain_pytorch(
    mesh: DeviceMesh, two_ranks: Ranks, mode: tuple[str, ...]
) -> None:
    first, second = two_ranks.run(trained, config_of_mode(*mode), 1)
    assert first["samples"] != second["samples"]
    assert first["metrics"] == second["metrics"]
    assert distance(first["weights"], plain(mesh)) < 1e-6


def held(mesh: DeviceMesh, config: Config) -> int:
    """Elements of the parameters on this rank."""
    parameters = Learner(mesh, config).policy.parameters()
    return sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))


@pytest.mark.parametrize(
    ("mode", "replicas"),
    [((), 1), (hybrid(2), 1), (hybrid(1), 2), ((f"{FSDP}.sharding_strategy=no_shard",), 2)],
    ids=["full", "hybrid_of_2", "hybrid_of_1", "none"],
)
def test_what_a_rank_holds(two_ranks: Ranks, mode: tuple[str, ...], replicas: int) -> None:
    whole = sum(p.numel() for p in small_policy(1).parameters())
    assert sum(two_ranks.run(held, config_of_mode(*mode))) == replicas * whole


def reductions(mesh: DeviceMesh, config: Config) -> int:
    """Of a shard unit's gradients, while a training step is done."""
    with patch.object(param_group, "foreach_reduce", wraps=vars(param_group)["foreach_reduce"]) as reduce:
        trained(mesh, config, 1)
    return reduce.call_count


def test_gradients_are_reduced_once_a_step(two_ranks: Ranks) -> None:
    units, steps = 3, 3  # policy, value head, and log_std in the root
    once = two_ranks.run(reductions, config_of_mode())
    assert once == [units * steps] * 2
    first, second = two_ranks.run(reductions, config_of_mode(*MODES["every_pass"]))
    assert first == second
    assert first % once[0] == 0
    assert first > once[0], "several micro-batches"


def saved_and_loaded(mesh: DeviceMesh, saved_as: Config, loaded_as: Config, directory: Any) -> list[Any]:
    learner = Learner(mesh, saved_as)
    learner.train(first=0)
    save_actor(learner.policy, learner.optimizer, directory)
    other = Learner(mesh, loaded_as)
    load_actor(other.policy, other.optimizer, directory)
    weights = [learner.weights(), other.weights()]
    for each in (learner, other):
        each.train(first=1)
    return [*weights, learner.weights(), other.weights()]


def test_a_checkpoint_can_be_loaded_in_another_mode(two_ranks: Ranks, tmp_path: Any) -> None:
    saved, loaded, goes_on, went_on = two_ranks.run(
        saved_and_loaded, config_of_mode(*hybrid(1)), config_of_mode(), tmp_path
    )[0]
    assert same(loaded, saved)
    assert distance(went_on, goes_on) < 1e-6


def test_offload_needs_something_to_offload_from(mesh: DeviceMesh) -> None:
    with pytest.raises(UserError, match=r"actor.fsdp_config.cpu_offload=true: .* set it to false"):
        Learner(mesh, config_of_mode(f"{FSDP}.cpu_offload=true"))
