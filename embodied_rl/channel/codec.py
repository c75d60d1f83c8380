"""Messages to bytes and back, with the bytes of tensors and arrays copied once each way.

Pickle protocol 5 (PEP 574) writes the structure into a small stream, while the blocks (the contents of tensors and
arrays above 4 KiB; for smaller ones the bookkeeping takes longer than another copy) are copied straight from where they
are to where the message goes. In memory a message is::

    stream length, number of blocks, each block's bytes | stream | block 0 | block 1 | ...

where integers are uint64 and every block starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.channel.memory import Array, Bytes, copy_bytes, new_bytes

_ALIGNMENT = 64
_SMALL = 4096
_COUNTS = struct.Struct("QQ")

# What numpy has no type for travels as integers of the same size.
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


class Encoded:
    """A message ready to be copied into ``nbytes`` bytes of memory. Until then it refers to the message's tensors."""

    __slots__ = ("_blocks", "_head", "_places", "_stream", "nbytes")

    def __init__(self, stream: bytes, blocks: list[Array]) -> None:
        self._stream, self._blocks = stream, blocks
        sizes = [block.nbytes for block in blocks]
        self._head = _COUNTS.pack(len(stream), len(sizes)) + struct.pack(f"{len(sizes)}Q", *sizes)
        self._places, self.nbytes = _layout(len(self._head) + len(stream), sizes)

    def write(self, memory: Bytes) -> None:
        """Copy the message to the start of ``memory``."""
        view, head = memory.data, len(self._head)
        view[:head] = self._head
        view[head : head + len(self._stream)] = self._stream
        for block, place in zip(self._blocks, self._places, strict=True):
            target = memory[place : place + block.nbytes]
            if block.flags.c_contiguous:
                copy_bytes(target, block.reshape(-1).view(np.uint8))
            else:
                np.copyto(target.view(block.dtype).reshape(block.shape), block)


def encode(item: Any) -> Encoded:
    """Prepare ``item`` for :meth:`Encoded.write`. No block is copied yet.

    Raises:
        TypeError: it holds a tensor that is not a dense CPU tensor, or something that cannot be pickled.
    """
    stream, blocks = io.BytesIO(), _Blocks()
    pickler = _Pickler(stream, protocol=5, buffer_callback=blocks)
    pickler.blocks = blocks
    try:
        pickler.dump(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"this {type(item).__name__} cannot be sent: {error}. "
            "A message is made of dense CPU tensors, arrays, plain values, and dataclasses and containers of them."
        ) from error
    return Encoded(stream.getvalue(), blocks.found)


def decode(memory: Bytes) -> Any:
    """The message at the start of ``memory``, which may be reused afterwards."""
    stream_length, count = _COUNTS.unpack_from(memory.data)
    sizes = struct.unpack_from(f"{count}Q", memory.data, _COUNTS.size)
    start = _COUNTS.size + 8 * count
    places, _ = _layout(start + stream_length, sizes)
    return pickle.loads(memory[start : start + stream_length].data, buffers=_views(memory, places, sizes))


def _layout(start: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each block begins, and where the last one ends."""
    places = []
    for size in sizes:
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        places.append(start)
        start += size
    return places, start


def _views(memory: Bytes, places: list[int], sizes: Sequence[int]) -> Iterator[Bytes]:
    for place, size in zip(places, sizes, strict=True):
        yield memory[place : place + size]


class _Blocks:
    """The blocks in the order in which the stream refers to them; called by the pickler for each PickleBuffer."""

    def __init__(self) -> None:
        self.found: list[Array] = []
        self._announced: Array | None = None

    def announce(self, block: Array) -> pickle.PickleBuffer | bytearray:
        """What to pickle next in the block's place."""
        if block.nbytes <= _SMALL:
            return bytearray(block.tobytes())
        # A stand-in, because a PickleBuffer of a strided array cannot be pickled.
        self._announced = block
        return pickle.PickleBuffer(bytearray())

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        if self._announced is None:
            return True  # somebody else's buffer: into the stream
        self.found.append(self._announced)
        self._announced = None
        return False


class _Pickler(pickle.Pickler):
    blocks: _Blocks

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor or issubclass(kind, Tensor):
            array, dtype = _array_of(obj)
            # numpy's types by name, because pickling them as objects is slow.
            return _to_tensor, (self.blocks.announce(array), array.dtype.str, array.shape, dtype)
        if kind is np.ndarray and obj.dtype.itemsize and not obj.dtype.hasobject:
            dtype = obj.dtype.str if obj.dtype.isbuiltin else obj.dtype
            return _to_array, (self.blocks.announce(obj), dtype, obj.shape)
        return NotImplemented


def _array_of(tensor: Tensor) -> tuple[Array, str | None]:
    """The tensor's memory as an array, and the tensor's dtype if numpy has no such."""
    if type(tensor) is Tensor:
        try:
            return tensor.numpy(), None
        except (TypeError, RuntimeError):
            pass  # it needs a gradient, or a type that numpy does not have, or is none that can be sent: see below
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"of type {type(tensor).__name__}: convert it to a torch.Tensor"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"of layout {tensor.layout} and dtype {tensor.dtype}: make it dense"
    elif tensor.device.type != "cpu":
        problem = f"on device {tensor.device}: move it with .cpu()"
    else:
        plain = tensor.detach().resolve_conj().resolve_neg()
        carrier = _CARRIERS.get(tensor.dtype)
        if carrier is None:
            return plain.numpy(), None
        return plain.view(carrier).numpy(), str(tensor.dtype).removeprefix("torch.")
    raise TypeError(f"it holds a tensor {problem} before the put")


def _to_array(block: Bytes | bytearray, dtype: str | np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if isinstance(block, bytearray):
        return np.ndarray(shape, dtype, block)
    owned = new_bytes(block.nbytes)
    copy_bytes(owned, block)
    return np.ndarray(shape, dtype, owned)


def _to_tensor(block: Bytes | bytearray, array_dtype: str, shape: tuple[int, ...], tensor_dtype: str | None) -> Tensor:
    tensor = torch.from_numpy(_to_array(block, array_dtype, shape))
    return tensor if tensor_dtype is None else tensor.view(getattr(torch, tensor_dtype))
