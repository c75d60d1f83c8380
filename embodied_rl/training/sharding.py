"""FSDP2 on one code path: gloo on CPUs, NCCL on GPUs, any number of ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.schema import FSDPConfig, MixedPrecisionConfig

_TIMEOUT = datetime.timedelta(minutes=30)


def init_process_group(*, device: str, rank: int, world_size: int, rendezvous: str) -> DeviceMesh:
    """Join the actor's ranks; they meet through a file, so no port has to be free.

    Args:
        rendezvous: a path that all ranks share and that does not exist yet; not used by a single rank.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    # All ranks are on this node; without this gloo looks up the host's name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore() if world_size == 1 else FileStore(rendezvous, world_size)
    dist.init_process_group(
        # Offloaded parameters and gradients are on the CPU.
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    return init_device_mesh("cuda" if on_gpu else "cpu", (world_size,))


def shard(policy: Policy, mesh: DeviceMesh, config: FSDPConfig) -> None:
    """Shard the policy in place: each of its blocks on its own, then what is left as the root.

    Args:
        mesh: of all ranks, as :func:`init_process_group` returns it.

    Raises:
        UserError: there is nothing to offload from.
    """
    if config.cpu_offload and mesh.device_type == "cpu":
        raise UserError(
            "actor.fsdp_config.cpu_offload=true: this actor has no accelerator, so all is in host memory already; set "
            "it to false"
        )
    blocks = _precision(config.mixed_precision)
    # Inputs of the policy as a whole are records, such as sampled actions, that the log-probabilities need as they are.
    root = MixedPrecisionPolicy(
        param_dtype=None if policy.float32_root else blocks.param_dtype,
        reduce_dtype=blocks.reduce_dtype,
        cast_forward_inputs=False,
    )
    replicas = _replicated(mesh, config)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    reshard = config.reshard_after_forward and config.sharding_strategy != "no_shard"
    for block in policy.shard_units():
        fully_shard(block, mesh=replicas, reshard_after_forward=reshard, mp_policy=blocks, offload_policy=offload)
    fully_shard(policy, mesh=replicas, reshard_after_forward=reshard, mp_policy=root, offload_policy=offload)


def _precision(config: MixedPrecisionConfig) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if config.param_dtype is None else getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
    )


def _replicated(mesh: DeviceMesh, config: FSDPConfig) -> DeviceMesh:
    """The mesh with a dimension of replicas before that of shards, where there are replicas."""
    if config.sharding_strategy == "full_shard":
        return mesh
    size = 1 if config.sharding_strategy == "no_shard" else config.fsdp_size
    assert size is not None  # the config's checks ask for it
    return init_device_mesh(mesh.device_type, (mesh.size() // size, size), mesh_dim_names=("replicate", "shard"))


def full_state_dict(policy: Policy) -> dict[str, Tensor]:
    """The whole model on the CPU, gathered from all ranks (a collective). Empty on ranks other than 0."""
    state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Cloned: with one rank the gathered tensors are the parameters themselves, which the next update changes.
    return {name: tensor.detach().clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def sum_over_ranks(device: str) -> Callable[[Tensor], Tensor]:
    """A callback that sums a tensor over the ranks and returns it where it came from."""
    return _collective(device, dist.ReduceOp.SUM)


def max_over_ranks(device: str) -> Callable[[Tensor], Tensor]:
    """As :func:`sum_over_ranks`, with the elementwise maximum."""
    return _collective(device, dist.ReduceOp.MAX)


def _collective(device: str, operation: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
    def reduce(tensor: Tensor) -> Tensor:
        moved = tensor.detach().clone().to(device)
        dist.all_reduce(moved, op=operation)
        return moved.to(tensor.device)

    return reduce


def gather_values(own: Tensor, device: str) -> Tensor:
    """All ranks' one-dimensional tensors, concatenated; ranks may hold different numbers of elements."""
    if dist.get_world_size() == 1:
        return own
    reduce_max = max_over_ranks(device)
    longest = int(reduce_max(torch.tensor([len(own)]))[0])
    padded = torch.zeros(longest, dtype=own.dtype, device=device)
    padded[: len(own)] = own.to(device)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in parts]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device))
    return torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)]).to(own.device)


def gather_ids(own: Tensor, device: str) -> Tensor:
    """All ranks' [*] int64 ids, concatenated; ranks may hold different numbers of them."""
    return gather_values(own, device)
