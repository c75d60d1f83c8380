"""Weights on one accelerator: an actor rank lends its rollout workers there a piece of device memory by CUDA IPC.

It writes buckets into that memory, and each receiver copies them into its policy, from device memory to device memory.
What a bucket is made of, where a version begins and ends, and the memory's handle travel over the channel of weights.
A receiver answers when it has copied a bucket; only then is its place written again, or the memory let go::

    actor rank                                      rollout worker
    writes bucket n into place n mod 2
    Lent (once), Announcement n             ─►      copies it
                                            ◄─      Taken
    bucket n + 2 waits for that
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor

from embodied_rl.channel.base import Channel
from embodied_rl.contracts import WeightBucket, WeightsEnd
from embodied_rl.errors import WeightSyncError
from embodied_rl.workers.weight_buckets import AnnouncedBuckets, Announcement, aligned

_PLACES: Final = 2
"""For buckets: one is written while another is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Memory that the buckets from now on are in. Producer: an actor rank. Consumer: its rollout workers."""

    handle: bytes
    """What ``ForkingPickler`` makes of a tensor, [bytes] of uint8: its CUDA IPC handle."""
    device: str
    """As :func:`identity` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A bucket has been copied. Producer: a rollout worker. Consumer: the actor rank that lends to it."""

    receiver: Hashable


def answers_to(rank: int) -> Hashable:
    """Key of the lane in which an actor rank gets :class:`Taken`."""
    return "taken", rank


def identity(device: str) -> str:
    """A device's name in torch and, of an accelerator, its number for ever."""
    return f"{device} ({torch.cuda.get_device_properties(device).uuid})" if device != "cpu" else device


class LendingSender:
    """An actor rank's end; stands in for the channel.

    Args:
        device: where the weights are.
        rank: the actor's.
        bucket_bytes: how large buckets are to be.
    """

    def __init__(self, channel: Channel, *, device: str, rank: int, bucket_bytes: int) -> None:
        self._channel, self._device, self._rank = channel, device, rank
        self._room = aligned(bucket_bytes)
        self._memory: Tensor | None = None
        self._sent = 0
        self._taken = Counter[Hashable]()

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        """Give these receivers the message; as ``Channel.put_all``. At a version's end all have copied it."""
        if isinstance(item, WeightsEnd):
            await self._wait_for_taken(self._sent, keys, timeout)
        if not isinstance(item, WeightBucket):
            return await self._channel.put_all(item, keys=keys, timeout=timeout)
        announced = Announcement.of(item)
        _, nbytes = announced.places()
        if self._memory is None or nbytes > self._room:
            await self._wait_for_taken(self._sent, keys, timeout)
            self._room = max(self._room, nbytes)
            self._memory = torch.empty(_PLACES * self._room, dtype=torch.uint8, device=self._device)
            for key in keys:  # torch counts that each handle is opened once
                lent = Lent(handle=bytes(ForkingPickler.dumps(self._memory)), device=identity(self._device))
                await self._channel.put_all(lent, keys=[key], timeout=timeout)
        await self._wait_for_taken(self._sent + 1 - _PLACES, keys, timeout)
        announced = replace(announced, at=self._sent % _PLACES * self._room)
        announced.write(item, self._memory[announced.at : announced.at + nbytes])
        _finish(self._device)
        await self._channel.put_all(announced, keys=keys, timeout=timeout)
        self._sent += 1
        return None

    async def _wait_for_taken(self, count: int, keys: Sequence[Hashable], timeout: float | None) -> None:
        """Until each receiver has copied so many buckets, of all."""
        while any(self._taken[key] < count for key in keys):
            answer = await self._channel.get(key=answers_to(self._rank), timeout=timeout)
            if not isinstance(answer, Taken):
                raise WeightSyncError(f"got {type(answer).__name__}, expected that a bucket of weights was taken")
            self._taken[answer.receiver] += 1


class LendingReceiver(AnnouncedBuckets):
    """A rollout worker's end.

    Args:
        device: the worker's.
        lender: rank of the actor there.
    """

    def __init__(self, channel: Channel, *, device: str, lender: int) -> None:
        super().__init__(channel)
        self._device, self._lender = device, lender
        self._memory: Tensor | None = None

    def _prepares(self, message: object) -> bool:
        if not isinstance(message, Lent):
            return False
        here = identity(self._device)
        if message.device != here:
            raise WeightSyncError(
                f"actor.sync_backend=cuda_ipc: got memory of {message.device}, expected memory of {here}; have actor "
                "and rollout workers see the same CUDA_VISIBLE_DEVICES, or use channel"
            )
        self._memory = pickle.loads(message.handle)
        return True

    def _values(self, announced: Announcement) -> Tensor:
        if self._memory is None:
            raise WeightSyncError("got a bucket of weights before the memory that it is in")
        return self._memory[announced.at : announced.at + announced.places()[1]]

    async def _used(self, key: Hashable) -> None:
        _finish(self._device)
        await self._channel.put(Taken(receiver=key), key=answers_to(self._lender))


def _finish(device: str) -> None:
    """Wait for the copies that were asked of the device, which the other process knows nothing of."""
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()
