"""The ends of the way that weights take, by ``RunPlan.weight_plane``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from embodied_rl.channel.base import Channel
from embodied_rl.channel.in_process import InProcessChannel
from embodied_rl.contracts import WeightBucket
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import WorkerContext
from embodied_rl.schema import EmbodiedConfig, MathConfig
from embodied_rl.workers.weight_broadcast import BroadcastReceiver, BroadcastSender, host_of
from embodied_rl.workers.weight_lending import LendingReceiver, LendingSender
from embodied_rl.workers.weight_sync import ReceivesWeights, SendsWeights

Plan = RunPlan[EmbodiedConfig] | RunPlan[MathConfig]


class InProcessSender:
    """The actor's end where its receivers are in its process: a bucket is handed over as it is, and copied once."""

    def __init__(self, channel: InProcessChannel) -> None:
        self._channel = channel

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        """Give these receivers the message; as ``Channel.put_all``."""
        if isinstance(item, WeightBucket):
            await self._channel.lend(item, keys=keys)
        else:
            await self._channel.put_all(item, keys=keys, timeout=timeout)


class SendingEnd(NamedTuple):
    """Where an actor rank puts its weights."""

    channel: SendsWeights
    receivers: Sequence[int]
    """Ranks of the rollout workers that get them from this one."""
    device: str
    """Where a bucket is put together."""


def sending_end(channel: Channel, plan: Plan, context: WorkerContext) -> SendingEnd:
    """An actor rank's end."""
    device, rank = context.device, context.rank
    if plan.weight_plane == "cuda_ipc":
        bucket_bytes = plan.config.actor.sync_bucket_mb * 2**20
        lender = LendingSender(channel, device=device, rank=rank, bucket_bytes=bucket_bytes)
        return SendingEnd(lender, plan.placement.beside("actor", rank, "rollout"), device)
    receivers = range(plan.world_size("rollout")) if rank == 0 else range(0)
    if plan.weight_plane == "collective" and receivers:
        host = host_of(context.rendezvous)
        return SendingEnd(
            BroadcastSender(channel, device=device, host=host, receivers=len(receivers)), receivers, device
        )
    if isinstance(channel, InProcessChannel):
        return SendingEnd(InProcessSender(channel), receivers, device)
    return SendingEnd(channel, receivers, "cpu")


def receiving_end(channel: Channel | None, plan: Plan, context: WorkerContext) -> ReceivesWeights:
    """A rollout worker's end."""
    assert channel is not None
    if plan.weight_plane == "cuda_ipc":
        (lender,) = plan.placement.beside("rollout", context.rank, "actor")
        return LendingReceiver(channel, device=context.device, lender=lender)
    if plan.weight_plane == "collective":
        return BroadcastReceiver(channel, device=context.device, rank=context.rank)
    return channel
