"""Buckets whose values travel beside the channel of weights: what the channel tells of them, and a receiver's end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from embodied_rl.channel.base import Channel
from embodied_rl.contracts import TensorLayout, WeightBucket, WeightPiece

T = TypeVar("T")

_ALIGNMENT = 16
"""Of a piece in a bucket's bytes: no type of a tensor is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A :class:`WeightBucket` without its values. Producer: an actor rank. Consumer: each of its rollout workers."""

    version: int
    number: int
    pieces: tuple[tuple[str, int, TensorLayout], ...]
    """Name, first element, and length and type of the values."""
    at: int = 0
    """Where in the memory that both ends have the bucket's bytes begin."""

    @staticmethod
    def of(bucket: WeightBucket) -> Announcement:
        """A bucket's."""
        pieces = (
            (piece.name, piece.start, TensorLayout(shape=(len(piece.values),), dtype=piece.values.dtype))
            for piece in bucket.pieces
        )
        return Announcement(version=bucket.version, number=bucket.number, pieces=tuple(pieces))

    def places(self) -> tuple[list[int], int]:
        """Where in the bucket's bytes each piece begins, and how many bytes there are."""
        starts, end = list[int](), 0
        for _, _, layout in self.pieces:
            starts.append(end)
            end += aligned(layout.shape[0] * layout.dtype.itemsize)
        return starts, end

    def write(self, bucket: WeightBucket, flat: Tensor) -> None:
        """Put the bucket's values to their places in ``flat``, [bytes] of uint8."""
        for start, piece in zip(self.places()[0], bucket.pieces, strict=True):
            flat[start : start + piece.values.nbytes] = piece.values.view(torch.uint8)

    def bucket(self, flat: Tensor) -> WeightBucket:
        """The bucket whose values are in ``flat``, which they refer to."""
        pieces = (
            WeightPiece(name=name, start=first, values=_at(flat, start, layout))
            for start, (name, first, layout) in zip(self.places()[0], self.pieces, strict=True)
        )
        return WeightBucket(version=self.version, number=self.number, pieces=tuple(pieces))


def aligned(nbytes: int) -> int:
    """So many bytes or a few more, after which any type may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _at(flat: Tensor, start: int, layout: TensorLayout) -> Tensor:
    return flat[start : start + layout.shape[0] * layout.dtype.itemsize].view(layout.dtype)


class AnnouncedBuckets:
    """A rollout worker's end of a way on which the channel only tells of buckets; stands in for the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        """As ``Channel.get``."""
        while self._prepares(message := await self._channel.get(key=key, timeout=timeout)):
            pass
        return message

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        """As ``Channel.read``."""
        message = await self.get(key=key, timeout=timeout)
        if not isinstance(message, Announcement):
            return use(message)
        result = use(message.bucket(self._values(message)))
        await self._used(key)
        return result

    def depth(self) -> Mapping[Hashable, int]:
        """As ``Channel.depth``."""
        return self._channel.depth()

    def _prepares(self, message: object) -> bool:
        """Whether a message is not the receiver's but this end's, which has done what it says."""
        raise NotImplementedError

    def _values(self, announced: Announcement) -> Tensor:
        """The bucket's bytes."""
        raise NotImplementedError

    async def _used(self, key: Hashable) -> None:
        """A bucket has been copied by the receiver ``key``."""
