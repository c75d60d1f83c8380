"""Linux objects without a name, shared by inheritance: the kernel frees them with the last process that has them.

Each is made of file descriptors, and made again from the inherited ones in another process. None of them closes its
descriptors; that is left to whoever created or inherited them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import select
import struct
import termios
import threading
import weakref
from typing import Any

import numpy as np

from embodied_rl.channel.memory import Bytes

_TOKEN = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
_PAGE = mmap.PAGESIZE


class TokenQueue:
    """A FIFO of (slot, bytes) pairs in a pipe.

    A pipe passes up to 4096 bytes on as a whole, so any number of processes may push and pop without a lock, which a
    killed process would keep for ever.
    """

    MAX_LIMIT = (2**20 - _PAGE) // _TOKEN.size
    """Tokens in the largest pipe that Linux allows everybody by default (``fs.pipe-max-size``, 1 MiB)."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd

    @staticmethod
    def create_fds(limit: int) -> tuple[int, int]:
        """The descriptors of a queue in which ``limit`` tokens always fit, so that a push never blocks.

        Raises:
            OSError: so large a pipe is not allowed.
        """
        read_fd, write_fd = os.pipe()
        # Several poppers may wake for one token; those who come late must not block in the read.
        os.set_blocking(read_fd, False)
        needed = limit * _TOKEN.size + _PAGE  # a page that is read in part still counts as full
        try:
            if fcntl.fcntl(write_fd, fcntl.F_GETPIPE_SZ) < needed:
                fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, needed)
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        return read_fd, write_fd

    def push(self, slot: int, nbytes: int) -> None:
        os.write(self.write_fd, _TOKEN.pack(slot, nbytes))

    def pop(self) -> tuple[int, int] | None:
        """The oldest token, or None where there is none."""
        try:
            slot, nbytes = _TOKEN.unpack(os.read(self.read_fd, _TOKEN.size))
        except BlockingIOError:
            return None
        return slot, nbytes

    def __len__(self) -> int:
        waiting = bytearray(4)
        fcntl.ioctl(self.read_fd, termios.FIONREAD, waiting)
        return int.from_bytes(waiting, "little") // _TOKEN.size


class SlotMemory:
    """Memory slots in one anonymous sparse file, each a terabyte of the file.

    Only pages that were written exist, so a slot is as large as its largest message, without anybody saying how large.
    """

    SLOT_BYTES = 1 << 40

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._windows: dict[int, Bytes] = {}

    @staticmethod
    def create_fd(name: str, slots: int) -> int:
        fd = os.memfd_create(name)
        os.ftruncate(fd, slots * SlotMemory.SLOT_BYTES)
        return fd

    def window(self, slot: int, nbytes: int) -> Bytes:
        """The slot's first ``nbytes`` bytes or more. A window is unmapped when nobody refers to it any more."""
        window = self._windows.get(slot)
        if window is None or window.nbytes < nbytes:
            # A power of two, so that messages that grow slowly do not map again and again.
            size = max(_PAGE, 1 << (nbytes - 1).bit_length())
            window = self._windows[slot] = _mapped(self.fd, size, slot * self.SLOT_BYTES)
        return window


def _mapped(fd: int, size: int, offset: int) -> Bytes:
    """A part of a file as memory, unmapped when nobody refers to it any more.

    Unlike ``mmap.mmap`` it keeps no descriptor: with one for each slot a channel of many slots would run out of them.
    """
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {size} bytes of shared memory: {os.strerror(number)}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    # At the interpreter's end somebody may still refer to it; the kernel unmaps it then.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return np.ctypeslib.as_array(memory)


_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_int64), pointer
    libc.munmap.argtypes, libc.munmap.restype = (pointer, size), number
    return libc


class ClosedFlag:
    """Whether, and because of which error, a channel is closed: a slot for the text, an event to wait on."""

    TEXT_BYTES = 64 * 1024

    def __init__(self, memory: SlotMemory, slot: int, event_fd: int) -> None:
        self.event_fd = event_fd
        self._memory_fd = memory.fd
        self._window = memory.window(slot, self.TEXT_BYTES).data
        self._threads = threading.Lock()

    def __bool__(self) -> bool:
        return self._window[0] != 0

    @property
    def error(self) -> str | None:
        (length,) = _LENGTH.unpack_from(self._window, 8)
        return bytes(self._window[16 : 16 + length]).decode(errors="replace") or None

    def set(self, error: str | None) -> None:
        """Set the flag, unless it is set, and wake every waiter. Of a long text the end is kept, as in tracebacks."""
        text = (error or "").encode()[16 - self.TEXT_BYTES :]
        # A file lock is the process's, so threads need their own; the kernel releases it if the process is killed.
        with self._threads:
            fcntl.lockf(self._memory_fd, fcntl.LOCK_EX)
            try:
                if not self:
                    _LENGTH.pack_into(self._window, 8, len(text))
                    self._window[16 : 16 + len(text)] = text
                    self._window[0] = 1
            finally:
                fcntl.lockf(self._memory_fd, fcntl.LOCK_UN)
        os.eventfd_write(self.event_fd, 1)


def wait_readable(fds: tuple[int, ...], seconds: float | None) -> None:
    """Sleep until one of ``fds`` can be read or the time is over."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(None if seconds is None else min(seconds * 1000 + 1, 2**31 - 1))
