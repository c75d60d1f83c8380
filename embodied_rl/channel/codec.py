"""Messages to bytes and back, with the bytes of tensors and arrays copied once each way.

Pickle protocol 5 (PEP 574) writes the structure into a small stream, while the blocks (the contents of tensors and
arrays above 4 KiB; for smaller ones the bookkeeping takes longer than another copy) are copied straight from where they
are to where the message goes. In memory a message is::

    stream's length (uint64) | stream | block | block | ...

where every block starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import io
import itertools
import math
import pickle
import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
_SMALL = 4096
_LENGTH = struct.Struct("Q")

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

    __slots__ = ("_blocks", "_start", "_stream", "nbytes")

    def __init__(self, stream: bytes, blocks: _Blocks) -> None:
        self._stream, self._blocks = stream, blocks
        self._start = _aligned(_LENGTH.size + len(stream))
        self.nbytes = self._start + blocks.nbytes

    def write(self, memory: Bytes) -> None:
        """Copy the message to the start of ``memory``."""
        view = memory.data
        _LENGTH.pack_into(view, 0, len(self._stream))
        view[_LENGTH.size : _LENGTH.size + len(self._stream)] = self._stream
        for array, offset in self._blocks.found:
            start = self._start + offset
            target = memory[start : start + array.nbytes]
            if array.flags.c_contiguous:
                # By memcpy, which is faster than torch's copy into what another core reads (docs/channels.md).
                target[:] = array.reshape(-1).view(np.uint8)
            else:
                np.copyto(target.view(array.dtype).reshape(array.shape), array)

    def parts(self) -> list[Any]:
        """The message as buffers that follow each other, for a socket; they refer to the message's tensors."""
        end = _LENGTH.size + len(self._stream)
        parts: list[Any] = [_LENGTH.pack(len(self._stream)), self._stream, bytes(self._start - end)]
        at = 0
        for array, offset in self._blocks.found:
            parts += [bytes(offset - at), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
            at = offset + array.nbytes
        return parts


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
    return Encoded(stream.getvalue(), blocks)


class _Borrowed(np.ndarray):
    """Blocks that a message's arrays may refer to instead of having copies."""


def decode(memory: Bytes, *, borrow: bool = False) -> Any:
    """The message at the start of ``memory``, which may be reused afterwards.

    Args:
        borrow: tensors and arrays above 4 KiB are not copied but refer to ``memory``, which must not be reused as long
            as they are.
    """
    view = memory.data
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    # Each buffer that the stream asks for is all blocks; it says itself where in them an array is.
    blocks = memory[_aligned(end) :]
    return pickle.loads(
        view[_LENGTH.size : end], buffers=itertools.repeat(blocks.view(_Borrowed) if borrow else blocks)
    )


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Blocks:
    """The arrays that go beside the stream, each with its offset; called by the pickler for every PickleBuffer."""

    def __init__(self) -> None:
        self.found: list[tuple[Array, int]] = []
        self.nbytes = 0
        self._own = False

    def reference(self, array: Array) -> tuple[pickle.PickleBuffer | bytearray, int]:
        """A stand-in to pickle instead of the array, and the array's offset."""
        if array.nbytes <= _SMALL:
            return bytearray(array.tobytes()), 0
        offset = _aligned(self.nbytes)
        self.found.append((array, offset))
        self.nbytes = offset + array.nbytes
        self._own = True
        return pickle.PickleBuffer(bytearray()), offset

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer goes into the stream: all but ours do."""
        own, self._own = self._own, False
        return not own


class _Pickler(pickle.Pickler):
    blocks: _Blocks

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor or issubclass(kind, Tensor):
            array, dtype = _array_of(obj)
            # numpy's types by name, because pickling them as objects is slow.
            return _to_tensor, (*self.blocks.reference(array), array.dtype.str, array.shape, dtype)
        if kind is np.ndarray and obj.dtype.itemsize and not obj.dtype.hasobject:
            return _to_array, (
                *self.blocks.reference(obj),
                obj.dtype.str if obj.dtype.isbuiltin else obj.dtype,
                obj.shape,
            )
        if (names := _fields(kind)) is not None:
            return _to_message, (kind, *[getattr(obj, name) for name in names])
        return NotImplemented


@dataclasses.dataclass(frozen=True, slots=True)
class _Nothing:
    """Has the ``__getstate__`` that such dataclasses are given."""


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass that is pickled by them: one with slots, and without ways of its own. Pickle
    would ask for them each time, which takes longer than all else."""
    own = kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__
    if own or getattr(kind, "__getstate__", None) is not _Nothing.__getstate__:
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _to_message(kind: type, *values: Any) -> Any:
    message = object.__new__(kind)
    for name, value in zip(_fields(kind) or (), values, strict=True):
        object.__setattr__(message, name, value)
    return message


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


def _to_array(blocks: Bytes | bytearray, offset: int, dtype: str | np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if isinstance(blocks, bytearray):
        return np.ndarray(shape, dtype, blocks)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if isinstance(blocks, _Borrowed):
        return np.ndarray(shape, dtype, blocks[offset : offset + nbytes])
    owned = new_bytes(nbytes)
    copy_bytes(owned, blocks[offset : offset + nbytes])
    return np.ndarray(shape, dtype, owned)


def _to_tensor(
    blocks: Bytes | bytearray, offset: int, array_dtype: str, shape: tuple[int, ...], dtype: str | None
) -> Tensor:
    tensor = torch.from_numpy(_to_array(blocks, offset, array_dtype, shape))
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


Array = NDArray[Any]
Bytes = NDArray[np.uint8]

# Where torch's allocation and copy are faster than numpy's, by about a fifth. For less its threads take longer to meet.
_LARGE = 1024 * 1024

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
_KEPT_FREE = 256 * 1024 * 1024


def new_bytes(nbytes: int) -> Bytes:
    """Uninitialized memory."""
    if nbytes < _LARGE:
        return np.empty(nbytes, np.uint8)
    return torch.empty(nbytes, dtype=torch.uint8).numpy()


def copy_bytes(target: Bytes, source: Bytes) -> None:
    if source.nbytes < _LARGE:
        target[:] = source
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB that it freed, for the next message.

    By default glibc gives large blocks back to the kernel as soon as they are freed, so each message would be received
    into pages that the kernel must first find, clear and map. The setting is for the whole process, and for blocks up
    to 32 MiB, which is the most that glibc accepts.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE)
