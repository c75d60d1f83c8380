"""Messages to bytes and back, with the bytes of tensors and arrays copied once each way.

Pickle protocol 5 (PEP 574) writes the structure into a small stream and hands out the large buffers beside it. They are
copied straight from where they are to where the message goes, strided ones too. In memory a message is::

    stream length, number of blocks, each block's bytes | stream | block 0 | block 1 | ...

where integers are little-endian uint64 and every block starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.channel.memory import copy_of

ALIGNMENT = 64
_COUNTS = struct.Struct("<QQ")

Bytes = NDArray[np.uint8]
Block = Tensor | NDArray[Any]


class Encoded:
    """A message ready to be copied into ``nbytes`` bytes of memory. It refers to the message's tensors."""

    __slots__ = ("_blocks", "_header", "_places", "_stream", "nbytes")

    def __init__(self, stream: memoryview, blocks: list[Block]) -> None:
        self._stream, self._blocks = stream, blocks
        sizes = [block.nbytes for block in blocks]
        self._header = _COUNTS.pack(len(stream), len(blocks)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        *self._places, self.nbytes = _places(len(self._header) + len(stream), sizes)

    def write(self, memory: Bytes) -> None:
        """Copy the message to the start of ``memory``."""
        view = memory.data
        head = len(self._header)
        view[:head] = self._header
        view[head : head + len(self._stream)] = self._stream
        for block, place in zip(self._blocks, self._places, strict=True):
            if isinstance(block, Tensor):
                target = torch.frombuffer(memory, dtype=block.dtype, count=block.numel(), offset=place)
                target.view(block.shape).copy_(block)
            else:
                np.copyto(memory[place : place + block.nbytes].view(block.dtype).reshape(block.shape), block)


def encode(item: Any) -> Encoded:
    """Prepare ``item`` for :meth:`Encoded.write`. Nothing large is copied yet.

    Raises:
        TypeError: it holds a tensor that is not a dense CPU tensor, or something that cannot be pickled.
    """
    stream, blocks = io.BytesIO(), _Blocks()
    try:
        _Pickler(stream, blocks).dump(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"this {type(item).__name__} cannot be sent: {error}. "
            "A message is made of dense CPU tensors, arrays, plain values, and dataclasses and containers of them."
        ) from error
    return Encoded(stream.getbuffer(), blocks.found)


def decode(memory: Bytes) -> Any:
    """The message at the start of ``memory``, which may be reused afterwards."""
    stream_length, count = _COUNTS.unpack_from(memory, 0)
    sizes = struct.unpack_from(f"<{count}Q", memory, _COUNTS.size)
    start = _COUNTS.size + 8 * count
    places = _places(start + stream_length, list(sizes))
    return pickle.loads(memory[start : start + stream_length].data, buffers=_copies(memory, places, sizes))


def _copies(memory: Bytes, places: list[int], sizes: tuple[int, ...]) -> Iterator[Bytes]:
    for place, size in zip(places, sizes, strict=False):
        yield copy_of(memory[place : place + size])


def _places(start: int, sizes: list[int]) -> list[int]:
    """Where each block begins and, last, where all end."""
    places = []
    for size in sizes:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        places.append(start)
        start += size
    return [*places, start]


class _Blocks:
    """Collects the blocks in the order in which the stream refers to them."""

    def __init__(self) -> None:
        self.found: list[Block] = []
        self._announced: Block | None = None

    def announce(self, block: Block) -> pickle.PickleBuffer:
        """A stand-in that, pickled next, becomes ``block``: a PickleBuffer itself cannot be strided."""
        self._announced = block
        return pickle.PickleBuffer(bytearray())

    def __call__(self, buffer: pickle.PickleBuffer) -> None:
        block, self._announced = self._announced, None
        self.found.append(np.frombuffer(buffer.raw(), np.uint8) if block is None else block)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, blocks: _Blocks) -> None:
        super().__init__(stream, protocol=5, buffer_callback=blocks)
        self._blocks = blocks

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            tensor = _plain(obj)
            # By name, because pickling a torch.dtype searches all modules for it.
            dtype = str(tensor.dtype).removeprefix("torch.")
            if not tensor.numel():
                return _empty_tensor, (dtype, tuple(tensor.shape))
            return _to_tensor, (self._blocks.announce(tensor), dtype, tuple(tensor.shape))
        if type(obj) is np.ndarray and obj.nbytes and not obj.dtype.hasobject:
            # numpy itself would write strided arrays, dates and times into the stream.
            if obj.flags.c_contiguous:
                return _to_array, (self._blocks.announce(obj.reshape(-1).view(np.uint8)), obj.dtype, obj.shape)
            if not obj.flags.f_contiguous:
                return _to_array, (self._blocks.announce(obj), obj.dtype, obj.shape)
        return NotImplemented


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"of type {type(tensor).__name__}: convert it to a torch.Tensor"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"of layout {tensor.layout} and dtype {tensor.dtype}: make it dense"
    elif tensor.device.type != "cpu":
        problem = f"on device {tensor.device}: move it with .cpu()"
    else:
        return tensor.detach() if tensor.requires_grad else tensor
    raise TypeError(f"it holds a tensor {problem} before the put")


def _to_tensor(buffer: Bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)


def _empty_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _to_array(buffer: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return buffer.view(dtype).reshape(shape)
