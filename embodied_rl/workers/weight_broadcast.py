"""Weights by a collective: the actor's rank 0 broadcasts each bucket, by NCCL from accelerator to accelerators, without
host memory in between, or by gloo between CPUs.

What a bucket is made of, and where a version begins and ends, travels over the channel of weights as ever, and so does
the address where they meet before the first. Both sides below stand in for that channel.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.channel.base import Channel
from embodied_rl.contracts import WeightBucket
from embodied_rl.errors import WeightSyncError
from embodied_rl.workers.weight_buckets import AnnouncedBuckets, Announcement

_TIMEOUT = datetime.timedelta(minutes=5)
"""A worker that is gone ends the run earlier: whoever sees it closes the channel and kills the others."""
_HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the process group of a run's weights meets. Producer: actor rank 0. Consumer: each rollout worker."""

    host: str
    port: int
    size: int
    """Rank 0 and the receivers, in the order of their ranks behind it."""


def host_of(rendezvous: str) -> str:
    """The address of the node that a group of workers meets on (``WorkerContext.rendezvous``)."""
    if not rendezvous.startswith("tcp://"):
        return _HERE
    return rendezvous.removeprefix("tcp://").rpartition(":")[0]


class BroadcastSender:
    """Actor rank 0's end.

    Args:
        device: where the weights are.
        host: address of this node that the receivers reach.
        receivers: how many there are.
    """

    def __init__(self, channel: Channel, *, device: str, host: str, receivers: int) -> None:
        self.device = device
        self._channel, self._host, self._receivers = channel, host, receivers
        self._group: _Group | None = None

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        """Give all receivers the message; as ``Channel.put_all``."""
        if self._group is None:
            from torch._C._distributed_c10d import TCPStore

            store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
            meeting = Meeting(host=self._host, port=store.port, size=1 + self._receivers)
            await self._channel.put_all(meeting, keys=keys, timeout=timeout)
            self._group = _Group(store, 0, meeting.size, self.device)
        if not isinstance(item, WeightBucket):
            return await self._channel.put_all(item, keys=keys, timeout=timeout)
        announced = Announcement.of(item)
        await self._channel.put_all(announced, keys=keys, timeout=timeout)
        flat = torch.empty(announced.places()[1], dtype=torch.uint8, device=self.device)
        announced.write(item, flat)
        self._group.broadcast(flat)
        return None


class BroadcastReceiver(AnnouncedBuckets):
    """A rollout worker's end.

    Args:
        device: where the policy's weights are wanted.
        rank: the worker's.
    """

    def __init__(self, channel: Channel, *, device: str, rank: int) -> None:
        super().__init__(channel)
        self._device, self._rank = device, rank
        self._group: _Group | None = None

    def _prepares(self, message: object) -> bool:
        if not isinstance(message, Meeting):
            return False
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(message.host, message.port, is_master=False, timeout=_TIMEOUT)
        self._group = _Group(store, 1 + self._rank, message.size, self._device)
        return True

    def _values(self, announced: Announcement) -> Tensor:
        if self._group is None:
            raise WeightSyncError("got a bucket of weights before the meeting of its process group")
        flat = torch.empty(announced.places()[1], dtype=torch.uint8, device=self._device)
        self._group.broadcast(flat)
        return flat


class _Group:
    """A process group of its own, beside the one that the actor's ranks train in."""

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        dist: Any = importlib.import_module("torch.distributed")  # NCCL is not in every build
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            if store.host == _HERE:  # or gloo looks up the host's name, which need not resolve
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout=_TIMEOUT)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def broadcast(self, flat: Tensor) -> None:
        """Rank 0's bytes to all.

        Raises:
            WeightSyncError: one of them is gone.
        """
        try:
            self._group.broadcast([flat], self._options).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"the broadcast of weights failed, as it does where a worker is gone: {error}"
            ) from error
