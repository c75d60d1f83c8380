"""The channel between the processes of one node.

Each key is a lane of ``capacity`` slots of shared memory. A token stands for a slot and is in one of the queues, or in
the hands of the process that writes or reads the slot::

           ┌──────────── free ◄───────────┐
      put: take, write message, push      │ get: take, read message, push
           └──────────► filled ───────────┘

A slot that was never used is taken only when no used one is free, so a lane takes memory for as many messages as have
waited in it at once, however many may.

So a lane needs no lock, producers and consumers copy at the same time, and the queue ``filled`` is the order of the
messages. A message for several lanes is written once, into one of ``capacity`` slots that belong to no lane: each
lane's token then stands for a slot of its own, which stays empty and bounds the lane, and says which shared slot to
read. The last reader frees that one.

Everything is anonymous: nothing is left behind, whichever process is killed. A process that is killed while it copies
takes its slot's token with it, so whoever notices its death closes the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import select
import struct
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing import reduction
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any, TypeVar

import numpy as np

from embodied_rl.channel import base
from embodied_rl.channel.base import ChannelClosed, ChannelTimeout, check_capacity, check_count, show_depths
from embodied_rl.channel.codec import Bytes, Encoded, decode, encode, keep_freed_memory

T = TypeVar("T")


_TOKEN = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
_PAGE = mmap.PAGESIZE
_LOCKED_BYTE = 1
_SHARED_SHIFT = 32
"""A token's bits above are the number of the shared slot that has the message; 0: its own has."""
_QUIET_S = 1.0
"""Seconds of waiting of which nobody is told."""
_SHORT_S = 300e-6
"""Seconds of a wait after which the next one is expected to be short, too."""
_YIELD_S = 100e-6
"""Seconds in which others are let go first before falling asleep, where a short wait is expected: waking up takes as
long."""


class TokenQueue:
    """A FIFO of (slot, bytes) pairs in a pipe.

    A pipe passes up to 4096 bytes on as a whole, so any number of processes may push and pop without a lock, which a
    killed process would keep for ever.
    """

    MAX_LIMIT = (2**20 - _PAGE) // _TOKEN.size
    """Tokens in the largest pipe that Linux allows everybody by default (``fs.pipe-max-size``, 1 MiB)."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.short = True
        """The last wait for a token, in this process, was short."""

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


class SharedSlots:
    """Slots for messages that several lanes get: which are free, and who has yet to read the others.

    Args:
        free: their queue.
        memory: that has them.
        first: the number of the first.
        count: how many there are.
        lanes: that may read.
    """

    def __init__(self, free: TokenQueue, memory: SlotMemory, first: int, count: int, lanes: int) -> None:
        self.free = free
        self._memory, self._first, self._shape = memory, first, (count, lanes)
        self._threads = threading.Lock()

    @functools.cached_property
    def _readers(self) -> Bytes:
        """[slots, lanes]: 1 where a lane will read a slot. Behind the slots, and mapped when it is needed."""
        count, lanes = self._shape
        return self._memory.window(self._first + count, count * lanes)[: count * lanes].reshape(count, lanes)

    def mark(self, slot: int, readers: Sequence[int]) -> None:
        """These lanes will read the slot, which was taken from the queue."""
        with self._locked():
            self._readers[slot - self._first, list(readers)] = 1

    def release(self, slot: int, readers: Sequence[int]) -> None:
        """These lanes will not read the slot any more."""
        with self._locked():
            row = self._readers[slot - self._first]
            row[list(readers)] = 0
            if not row.any():
                self.free.push(slot, 0)

    def forget(self, readers: Sequence[int]) -> None:
        """These lanes read nothing any more of what there is, and nobody takes a slot meanwhile."""
        with self._locked():
            while self.free.pop() is not None:
                pass
            self._readers[:, list(readers)] = 0
            for number in np.flatnonzero(~self._readers.any(1)):
                self.free.push(self._first + int(number), 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # As in ClosedFlag, with a byte of the file that is not its.
        with self._threads:
            fcntl.lockf(self._memory.fd, fcntl.LOCK_EX, 1, _LOCKED_BYTE)
            try:
                yield
            finally:
                fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, 1, _LOCKED_BYTE)


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
            fcntl.lockf(self._memory_fd, fcntl.LOCK_EX, 1)
            try:
                if not self:
                    _LENGTH.pack_into(self._window, 8, len(text))
                    self._window[16 : 16 + len(text)] = text
                    self._window[0] = 1
            finally:
                fcntl.lockf(self._memory_fd, fcntl.LOCK_UN, 1)
        os.eventfd_write(self.event_fd, 1)


def wait_readable(fds: tuple[int, ...], seconds: float | None) -> list[int]:
    """Sleep until one of ``fds`` can be read or the time is over; returns those that can."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if seconds is None else min(seconds * 1000 + 1, 2**31 - 1))]


@dataclass(frozen=True, slots=True)
class _Lane:
    free: TokenQueue
    filled: TokenQueue
    unused: TokenQueue
    """Slots that have never been in ``free``."""


_QUEUES = len(fields(_Lane))


class SharedMemoryChannel:
    """Lanes in anonymous shared memory, for any number of producers and consumers in processes and threads.

    Made by one process and handed to others as an argument of ``Process`` (or inside one). Its coroutines never
    suspend: they block the calling thread, asleep. Linux only. Each process has four file descriptors of it and six
    more a key.
    """

    MAX_CAPACITY = TokenQueue.MAX_LIMIT
    LARGEST = SlotMemory.SLOT_BYTES
    """Bytes of a message."""

    def __init__(self, name: str, keys: Sequence[Hashable], capacity: int, context: BaseContext) -> None:
        """
        Args:
            name: for error messages.
            keys: every key that will be used.
            capacity: messages that may wait in each lane, 1 to 65,280.
            context: what the workers are started with. It must start them by ``spawn``, which passes descriptors on.

        Raises:
            ValueError: no or repeated keys, a capacity out of range, another start method.
            OSError: too many open files or pipes.
        """
        check_capacity(name, capacity, at_most=self.MAX_CAPACITY)
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"channel {name!r}: got keys {list(keys)}, expected one or more, each once")
        if context.get_start_method() != "spawn":
            raise ValueError(
                f"channel {name!r}: got a context that starts processes by {context.get_start_method()!r}, "
                'expected multiprocessing.get_context("spawn")'
            )
        fds: list[int] = []
        try:
            fds.append(SlotMemory.create_fd(name, slots=2 + (len(keys) + 1) * capacity))
            fds.append(os.eventfd(0))
            for _ in range(1 + _QUEUES * len(keys)):
                fds += TokenQueue.create_fds(capacity)
        except OSError as error:
            _close_all(fds)
            needed = f"{4 + 2 * _QUEUES * len(keys)} file descriptors for {len(keys)} keys"
            raise OSError(
                error.errno,
                f"channel {name!r} needs {needed}, got {error.strerror!r}: raise ulimit -n or use fewer keys"
                + (f"; pipes for {capacity} messages may need a larger fs.pipe-max-size" if capacity > 1024 else ""),
            ) from error
        self._assemble(name, keys, capacity, fds)
        # Slot 0 is the closed flag's.
        for index, lane in enumerate(self._lanes.values()):
            for slot in range(capacity):
                lane.unused.push(1 + index * capacity + slot, 0)
        for slot in range(capacity):
            self._shared.free.push(1 + len(keys) * capacity + slot, 0)

    def _assemble(self, name: str, keys: Sequence[Hashable], capacity: int, fds: list[int]) -> None:
        memory_fd, event_fd, *shared_fds = fds[:4]
        queue_fds = fds[4:]
        queues = [TokenQueue(*queue_fds[i : i + 2]) for i in range(0, len(queue_fds), 2)]
        self.name, self._capacity = name, capacity
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._lanes = {key: _Lane(*queues[_QUEUES * i : _QUEUES * (i + 1)]) for i, key in enumerate(keys)}
        self._memory = SlotMemory(memory_fd)
        self._closed = ClosedFlag(self._memory, slot=0, event_fd=event_fd)
        self._shared = SharedSlots(
            TokenQueue(*shared_fds), self._memory, 1 + len(keys) * capacity, count=capacity, lanes=len(keys)
        )
        # Taken by a get_batch that ran out of time.
        self._kept: dict[Hashable, deque[Any]] = {key: deque() for key in keys}
        self._fds = fds
        weakref.finalize(self, _close_all, fds)
        keep_freed_memory()

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        self._put(encode(item), key, timeout)

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        if len(keys) == 1:
            return await self.put(item, key=keys[0], timeout=timeout)
        if keys:
            self._share(encode(item), keys, timeout)
        return None

    def _put(self, encoded: Encoded, key: Hashable, timeout: float | None) -> None:
        lane = self._lane(key)
        slot, _ = self._take(lane.free, key, timeout, time.monotonic(), spare=lane.unused)
        try:
            encoded.write(self._memory.window(slot, encoded.nbytes))
        except BaseException:
            lane.free.push(slot, 0)
            raise
        lane.filled.push(slot, encoded.nbytes)

    def _share(self, encoded: Encoded, keys: Sequence[Hashable], timeout: float | None) -> None:
        started, own = time.monotonic(), dict[Hashable, int]()
        readers, shared = list[int](), None
        try:
            for key in keys:
                lane = self._lane(key)
                own[key], _ = self._take(lane.free, key, timeout, started, spare=lane.unused)
            readers += [self._numbers[key] for key in keys]
            shared, _ = self._take(self._shared.free, keys[0], timeout, started)
            self._shared.mark(shared, readers)
            encoded.write(self._memory.window(shared, encoded.nbytes))
        except BaseException:
            for key, slot in own.items():
                self._lanes[key].free.push(slot, 0)
            if shared is not None:
                self._shared.release(shared, readers)
            raise
        for key, slot in own.items():
            self._lanes[key].filled.push(slot | shared << _SHARED_SHIFT, encoded.nbytes)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        return self._receive(key, timeout, time.monotonic())

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        lane, started = self._lane(key), time.monotonic()
        if self._kept[key]:
            return use(self._receive(key, timeout, started))
        token, nbytes = self._take(lane.filled, key, timeout, started)
        try:
            return use(decode(self._holding(token, nbytes), borrow=True))
        finally:
            self._free(key, token)

    async def get_batch(self, n: int, *, key: Hashable = 0, timeout: float | None = None) -> list[Any]:
        check_count(self.name, n)
        started = time.monotonic()
        batch: list[Any] = []
        try:
            while len(batch) < n:
                batch.append(self._receive(key, timeout, started))
        except ChannelTimeout:
            self._kept[key].extendleft(reversed(batch))
            raise
        return batch

    def close(self, error: str | None = None) -> None:
        self._closed.set(error)

    def reset(self, keys: Sequence[Hashable], but: Collection[int] = ()) -> None:
        """Empty these lanes, and find the slots again that killed processes took along, ``but`` those. For the process
        that made the channel, while nobody uses the lanes."""
        self._shared.forget([self._numbers[key] for key in keys])
        for key in keys:
            lane = self._lanes[key]
            for queue in (lane.free, lane.filled, lane.unused):
                while queue.pop() is not None:
                    pass
            first = 1 + self._numbers[key] * self._capacity
            for slot in range(first, first + self._capacity):
                if slot not in but:
                    lane.unused.push(slot, 0)

    def depth(self) -> dict[Hashable, int]:
        return {key: len(lane.filled) for key, lane in self._lanes.items()}

    def take_free(self, key: Hashable) -> int | None:
        """A place of the lane, to be written to its :meth:`window` and then given to :meth:`commit` or
        :meth:`give_back`; None where there is none.

        Raises:
            ChannelClosed.
        """
        lane = self._lane(key)
        self.check_open()
        token = lane.free.pop() or lane.unused.pop()
        return None if token is None else token[0]

    def wait_for_room(self, key: Hashable, stop: int | None) -> bool:
        """Sleep until the lane may have a free place, or ``stop``, a file descriptor, can be read: True then."""
        fds = (self._lane(key).free.read_fd, self._closed.event_fd)
        return stop in wait_readable(fds if stop is None else (*fds, stop), None)

    def window(self, slot: int, nbytes: int) -> Bytes:
        """Memory of a reserved place, at least so many bytes."""
        return self._memory.window(slot, nbytes)

    def commit(self, key: Hashable, slot: int, nbytes: int) -> None:
        """The place holds a message: append it to the lane."""
        self._lane(key).filled.push(slot, nbytes)

    def give_back(self, key: Hashable, slot: int) -> None:
        """The reserved place is not needed."""
        self._lane(key).free.push(slot, 0)

    @property
    def closed_fd(self) -> int:
        """A file descriptor that can be read once the channel is closed."""
        return self._closed.event_fd

    @property
    def closed_error(self) -> str | None:
        """The error it was closed with."""
        return self._closed.error

    def _receive(self, key: Hashable, timeout: float | None, started: float) -> Any:
        lane = self._lane(key)
        if self._kept[key]:
            self.check_open()
            return self._kept[key].popleft()
        token, nbytes = self._take(lane.filled, key, timeout, started)
        try:
            return decode(self._holding(token, nbytes))
        finally:
            self._free(key, token)

    def _holding(self, token: int, nbytes: int) -> Bytes:
        """The memory of the message that a token of a lane's ``filled`` stands for."""
        return self._memory.window(token >> _SHARED_SHIFT or token, nbytes)

    def _free(self, key: Hashable, token: int) -> None:
        """The lane has read that message."""
        if shared := token >> _SHARED_SHIFT:
            self._shared.release(shared, [self._numbers[key]])
        self._lanes[key].free.push(token & (1 << _SHARED_SHIFT) - 1, 0)

    def _take(
        self,
        queue: TokenQueue,
        key: Hashable,
        timeout: float | None,
        started: float,
        spare: TokenQueue | None = None,
    ) -> tuple[int, int]:
        """The queue's next token, or else one of ``spare``, to which nobody adds any."""
        announced, began = False, time.monotonic()
        awake_until = began + _YIELD_S if queue.short else began
        try:
            while True:
                self.check_open()
                token = queue.pop()
                if token is None and spare is not None:
                    token = spare.pop()
                now = time.monotonic()
                if token is not None:
                    queue.short = now - began < _SHORT_S
                    return token
                if now < awake_until:
                    os.sched_yield()
                    continue
                remaining = None if timeout is None else started + timeout - now
                if remaining is not None and remaining <= 0:
                    raise self._timed_out(queue, key, now - started)
                if not announced and now - began >= _QUIET_S:
                    announced = True
                    base.on_wait(f"{self._wanted(queue, key)} of channel {self.name!r} with key {key!r}")
                if not announced:
                    remaining = min(began + _QUIET_S - now, remaining or _QUIET_S)
                wait_readable((queue.read_fd, self._closed.event_fd), remaining)
        finally:
            if announced:
                base.on_wait(None)

    def _wanted(self, queue: TokenQueue, key: Hashable) -> str:
        return "a message" if queue is self._lanes[key].filled else "room for a message"

    def _timed_out(self, queue: TokenQueue, key: Hashable, waited: float) -> ChannelTimeout:
        what = self._wanted(queue, key)
        other = "producer" if what == "a message" else "consumer"
        return ChannelTimeout(
            f"channel {self.name!r}: waited {waited:.1f} s for {what} with key {key!r} "
            f"(messages waiting: {show_depths(self.depth())}). The {other} is slow, stuck or dead: "
            "look at its log and stack, or allow a longer timeout."
        )

    def check_open(self) -> None:
        """Raise ChannelClosed if it is."""
        if self._closed:
            raise ChannelClosed(self.name, self._closed.error)

    def _lane(self, key: Hashable) -> _Lane:
        try:
            return self._lanes[key]
        except KeyError:
            declared = ", ".join(map(repr, self._lanes))
            raise KeyError(
                f"channel {self.name!r}: got key {key!r}, expected one of those it was created with: {declared}"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise RuntimeError(
                f"channel {self.name!r} can only be pickled while a process is being spawned: pass it in the args of "
                "multiprocessing.get_context('spawn').Process, not through a queue, a pipe or a pool"
            )
        fds = [reduction.DupFd(fd) for fd in self._fds]
        return _reassemble, (type(self), self.name, tuple(self._lanes), self._capacity, fds)


def _reassemble(
    cls: type[SharedMemoryChannel], name: str, keys: tuple[Hashable, ...], capacity: int, inherited: list[Any]
) -> SharedMemoryChannel:
    fds = [fd.detach() for fd in inherited]
    for fd in fds:
        os.set_inheritable(fd, False)
    channel = cls.__new__(cls)
    channel._assemble(name, keys, capacity, fds)
    return channel


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
