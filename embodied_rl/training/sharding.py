"""FSDP2: gloo on CPUs, NCCL on GPUs, any number of ranks. Also compilation, recomputation, offload."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.host import release_memory
from embodied_rl.models.weights.stored import settle, wanted
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.schema import FSDPConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_TIMEOUT = datetime.timedelta(minutes=30)


def init_process_group(*, device: str, rank: int, world_size: int, rendezvous: str) -> DeviceMesh:
    """Join the actor's ranks; on one node they meet through a file, so no port has to be free.

    Args:
        rendezvous: a path that all ranks share and that does not exist yet, or ``tcp://host:port`` where rank 0 is to
            listen; not used by a single rank.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    # Ranks that meet by a file are on this node; without this gloo looks up the host's name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _meet(rank, world_size, rendezvous)
    dist.init_process_group(
        # Offloaded parameters and gradients are on the CPU.
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    return init_device_mesh("cuda" if on_gpu else "cpu", (world_size,))


def _meet(rank: int, world_size: int, rendezvous: str) -> Store:
    if world_size == 1:
        return HashStore()
    if not rendezvous.startswith("tcp://"):
        return FileStore(rendezvous, world_size)
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=_TIMEOUT)


def shard(policy: Policy, mesh: DeviceMesh, config: FSDPConfig) -> None:
    """Shard the policy in place: each of its blocks on its own, then what is left as the root. Each is moved to the
    mesh's device, and takes the type that is wanted of it, just before: a policy that is as its files have it
    (:mod:`embodied_rl.models.weights.stored`) is never there as a whole.

    A CPU alone keeps a float32 policy as it is: there is nobody to share with and nothing to cast, and FSDP2's hooks
    take longer than a small network.

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
    precision = config.mixed_precision
    types = {precision.param_dtype or "float32", precision.reduce_dtype}
    float32 = types == {"float32"} and all(wanted(parameter) == torch.float32 for parameter in policy.parameters())
    if float32 and mesh.device_type == "cpu" and mesh.size() == 1:
        settle(policy)
        return
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    blocks = MixedPrecisionPolicy(
        param_dtype=None if precision.param_dtype is None else getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
    )
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
        settle(block)
        fully_shard(block, mesh=replicas, reshard_after_forward=reshard, mp_policy=blocks, offload_policy=offload)
    settle(policy)
    fully_shard(policy, mesh=replicas, reshard_after_forward=reshard, mp_policy=root, offload_policy=offload)
    for name in policy.sharded_methods:
        register_fsdp_forward_method(policy, name)


def is_sharded(module: object) -> TypeGuard[FSDPModule]:
    """Whether :func:`shard` made an FSDP module of it. Asking imports nothing: FSDP takes more than half a second."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a sharded policy's: a part of a tensor here, others elsewhere."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _replicated(mesh: DeviceMesh, config: FSDPConfig) -> DeviceMesh:
    """The mesh with a dimension of replicas before that of shards, where there are replicas."""
    if config.sharding_strategy == "full_shard":
        return mesh
    size = 1 if config.sharding_strategy == "no_shard" else config.fsdp_size
    assert size is not None  # the config's checks ask for it
    return init_device_mesh(mesh.device_type, (mesh.size() // size, size), mesh_dim_names=("replicate", "shard"))


def sum_over_ranks(device: str) -> Callable[[Tensor], Tensor]:
    """A callback that sums a tensor over the ranks and returns it where it came from."""
    return _collective(device, dist.ReduceOp.SUM)


def max_over_ranks(device: str) -> Callable[[Tensor], Tensor]:
    """A callback like :func:`sum_over_ranks`, with the elementwise maximum."""
    return _collective(device, dist.ReduceOp.MAX)


def _collective(device: str, operation: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
    def reduce(tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        if dist.get_world_size() == 1:  # gloo would take a millisecond and another thread for nothing
            return own
        moved = own.to(device)
        dist.all_reduce(moved, op=operation)
        return moved.to(tensor.device)

    return reduce


def gather_values(own: Tensor) -> Tensor:
    """All ranks' tensors, concatenated; ranks may hold different numbers of elements."""
    parts: list[Tensor] = [own] * dist.get_world_size()
    if len(parts) > 1:
        dist.all_gather_object(parts, own.cpu())
    return torch.cat(parts).to(own.device)


def compile_blocks(policy: Policy) -> None:
    """Compile the forward pass of each block, in place; names of modules and parameters stay.

    Raises:
        UserError: the model names no blocks.
    """
    _require_blocks(policy, "actor.torch_compile")
    for block in policy.shard_units():
        # FSDP's hooks stay outside.
        block.forward = torch.compile(block.forward)


def checkpoint_blocks(policy: Policy) -> None:
    """Keep only each block's inputs for the backward pass, in place; call it after :func:`compile_blocks`.

    Not torch's ``checkpoint_wrapper``, which puts a module around each block and so its own name into those of all
    parameters.

    Raises:
        UserError: the model names no blocks.
    """
    _require_blocks(policy, "actor.gradient_checkpointing")
    for block in policy.shard_units():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _require_blocks(policy: Policy, key: str) -> None:
    if not policy.shard_units():
        raise UserError(
            f"{key}=true: {type(policy).__name__} names no blocks to apply it to; set it to false, or name them in its "
            "shard_units()"
        )


class TrainingState:
    """Sharded policies and an optimiser that are on a device while they train, and else, in part or whole, in host
    memory.

    Args:
        policies: the one that is trained, and those beside it.
        parts: what leaves the device. Gradients are dropped, which the next update does not need; with the weights,
            too, beside which they lie.
    """

    def __init__(
        self,
        policies: Sequence[nn.Module],
        optimizer: Optimizer,
        device: str,
        parts: Collection[str] = ("weights", "gradients", "optimizer"),
    ) -> None:
        self._policies, self._optimizer, self._device, self._parts = policies, optimizer, device, parts

    @contextlib.contextmanager
    def on_device(self, timer: PhaseTimer) -> Iterator[None]:
        """Training may go on inside. Phases ``load`` and ``offload`` of ``timer`` say what the moves take."""
        with timer.phase("load"):
            # All of the optimiser's state: what was read from a checkpoint lies where the weights lay then.
            self._move(self._device, {*self._parts, "optimizer"})
        try:
            yield
        finally:
            with timer.phase("offload"):
                self.leave_device()

    def leave_device(self) -> None:
        """Take all that is to leave it to host memory."""
        if set(self._parts) & {"weights", "gradients"}:
            self._optimizer.zero_grad(set_to_none=True)
        self._move("cpu", self._parts)

    def _move(self, device: str, parts: Collection[str]) -> None:
        if "weights" in parts:
            for policy in self._policies:
                policy.to(device)
        if "optimizer" in parts:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    state = self._optimizer.state.get(parameter, {})
                    for name, value in state.items():
                        # Only a fused optimiser has the number of its steps on the device.
                        if isinstance(value, Tensor) and (value.ndim or group.get("fused")):
                            state[name] = value.to(device)
        release_memory(self._device)
