"""The memory that received messages live in, and copying into it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

# Where torch's allocation and copy begin to be faster than numpy's; by about a fifth for megabytes.
_LARGE = 64 * 1024

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
