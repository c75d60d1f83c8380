from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embodied_rl.training.sharding import gather_values, max_over_ranks, shard, sum_over_ranks
from tests.gathered import full_state_dict
from tests.training.learner import same, training_config
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy


def collectives(mesh: DeviceMesh) -> dict[str, Tensor]:
    rank = mesh.get_rank()
    own = torch.tensor([1.0 + rank, 10.0 * (1 - rank)], dtype=torch.float64)
    sums, maxima = sum_over_ranks("cpu")(own), max_over_ranks("cpu")(own)
    ids = gather_values(torch.arange(3 * rank, dtype=torch.int64) + 100 * rank)
    return {"own": own, "sum": sums, "max": maxima, "ids": ids}


def test_collectives(two_ranks: Ranks) -> None:
    for rank, got in enumerate(two_ranks.run(collectives)):
        assert got["own"].tolist() == [1.0 + rank, 10.0 * (1 - rank)], "the input stays as it was"
        assert got["sum"].tolist() == [3.0, 10.0]
        assert got["max"].tolist() == [2.0, 10.0]
        assert got["ids"].tolist() == [100, 101, 102], "rank 0 has none"


def test_collectives_of_one_rank(mesh: DeviceMesh) -> None:
    assert sum_over_ranks("cpu")(torch.tensor([2.0])).tolist() == [2.0]
    assert gather_values(torch.tensor([4, 2])).tolist() == [4, 2]


def sharded(mesh: DeviceMesh) -> dict[str, object]:
    policy = small_policy(1)
    shard(policy, mesh, training_config("ppo").actor.fsdp_config)
    parameters = list(policy.parameters())
    return {
        "all_sharded": all(isinstance(p, DTensor) for p in parameters),
        "local": sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
        "whole": full_state_dict(policy),
    }


def test_every_parameter_is_sharded_and_can_be_gathered(two_ranks: Ranks) -> None:
    expected = {name: tensor.detach() for name, tensor in small_policy(1).state_dict().items()}
    first, second = two_ranks.run(sharded)
    assert first["all_sharded"]
    assert second["all_sharded"]
    assert first["local"] + second["local"] == sum(tensor.numel() for tensor in expected.values())
    assert same(first["whole"], expected)
    assert second["whole"] == {}, "gathered by rank 0 alone"


def test_the_gathered_weights_are_a_copy(mesh: DeviceMesh) -> None:
    policy = small_policy()
    shard(policy, mesh, training_config("grpo").actor.fsdp_config)
    before = full_state_dict(policy)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert same(before, kept)
    assert dist.get_world_size() == 1
