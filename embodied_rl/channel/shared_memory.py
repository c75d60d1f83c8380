"""The channel between the processes of one node.

Each key is a lane of ``capacity`` slots of shared memory. A token stands for a slot and is in one of the queues, or in
the hands of the process that writes or reads the slot::

           ┌──────────── free ◄───────────┐
      put: take, write message, push      │ get: take, read message, push
           └──────────► filled ───────────┘

A slot that was never used is taken only when no used one is free, so a lane takes memory for as many messages as have
waited in it at once, however many may.

So a lane needs no lock, producers and consumers copy at the same time, and the queue ``filled`` is the order of the
messages. Everything is anonymous: nothing is left behind, whichever process is killed. A process that is killed while
it copies takes its slot's token with it, so whoever notices its death closes the channel.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from multiprocessing import reduction
from multiprocessing.context import BaseContext, get_spawning_popen
from typing import Any, TypeVar

from embodied_rl.channel.base import ChannelClosed, ChannelTimeout, check_capacity, check_count, show_depths
from embodied_rl.channel.codec import decode, encode
from embodied_rl.channel.kernel_objects import ClosedFlag, SlotMemory, TokenQueue, wait_readable
from embodied_rl.channel.memory import keep_freed_memory

T = TypeVar("T")


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
    suspend: they block the calling thread, asleep. Linux only. Each process has two file descriptors of it and six more
    a key.
    """

    MAX_CAPACITY = TokenQueue.MAX_LIMIT

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
            fds.append(SlotMemory.create_fd(name, slots=1 + len(keys) * capacity))
            fds.append(os.eventfd(0))
            for _ in range(_QUEUES * len(keys)):
                fds += TokenQueue.create_fds(capacity)
        except OSError as error:
            _close_all(fds)
            needed = f"{2 + 2 * _QUEUES * len(keys)} file descriptors for {len(keys)} keys"
            raise OSError(
                error.errno,
                f"channel {name!r} needs {needed}, got {error.strerror!r}: raise ulimit -n or use fewer keys"
                + (f"; pipes for {capacity} messages may need a larger fs.pipe-max-size" if capacity > 1024 else ""),
            ) from error
        self._assemble(name, keys, fds)
        # Slot 0 is the closed flag's.
        for index, lane in enumerate(self._lanes.values()):
            for slot in range(capacity):
                lane.unused.push(1 + index * capacity + slot, 0)

    def _assemble(self, name: str, keys: Sequence[Hashable], fds: list[int]) -> None:
        memory_fd, event_fd, *queue_fds = fds
        queues = [TokenQueue(*queue_fds[i : i + 2]) for i in range(0, len(queue_fds), 2)]
        self.name = name
        self._lanes = {key: _Lane(*queues[_QUEUES * i : _QUEUES * (i + 1)]) for i, key in enumerate(keys)}
        self._memory = SlotMemory(memory_fd)
        self._closed = ClosedFlag(self._memory, slot=0, event_fd=event_fd)
        # Taken by a get_batch that ran out of time.
        self._kept: dict[Hashable, deque[Any]] = {key: deque() for key in keys}
        self._fds = fds
        weakref.finalize(self, _close_all, fds)
        keep_freed_memory()

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        lane = self._lane(key)
        encoded = encode(item)
        slot, _ = self._take(lane.free, key, timeout, time.monotonic(), spare=lane.unused)
        try:
            encoded.write(self._memory.window(slot, encoded.nbytes))
        except BaseException:
            lane.free.push(slot, 0)
            raise
        lane.filled.push(slot, encoded.nbytes)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        return self._receive(key, timeout, time.monotonic())

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        lane, started = self._lane(key), time.monotonic()
        if self._kept[key]:
            return use(self._receive(key, timeout, started))
        slot, nbytes = self._take(lane.filled, key, timeout, started)
        try:
            return use(decode(self._memory.window(slot, nbytes), borrow=True))
        finally:
            lane.free.push(slot, 0)

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

    def depth(self) -> dict[Hashable, int]:
        return {key: len(lane.filled) for key, lane in self._lanes.items()}

    def _receive(self, key: Hashable, timeout: float | None, started: float) -> Any:
        lane = self._lane(key)
        if self._kept[key]:
            self._check_open()
            return self._kept[key].popleft()
        slot, nbytes = self._take(lane.filled, key, timeout, started)
        try:
            return decode(self._memory.window(slot, nbytes))
        finally:
            lane.free.push(slot, 0)

    def _take(
        self,
        queue: TokenQueue,
        key: Hashable,
        timeout: float | None,
        started: float,
        spare: TokenQueue | None = None,
    ) -> tuple[int, int]:
        """The queue's next token, or else one of ``spare``, to which nobody adds any."""
        while True:
            self._check_open()
            token = queue.pop()
            if token is None and spare is not None:
                token = spare.pop()
            if token is not None:
                return token
            remaining = None
            if timeout is not None:
                remaining = started + timeout - time.monotonic()
                if remaining <= 0:
                    raise self._timed_out(queue, key, time.monotonic() - started)
            wait_readable((queue.read_fd, self._closed.event_fd), remaining)

    def _timed_out(self, queue: TokenQueue, key: Hashable, waited: float) -> ChannelTimeout:
        filled = queue is self._lanes[key].filled
        what, other = ("a message", "producer") if filled else ("room for a message", "consumer")
        return ChannelTimeout(
            f"channel {self.name!r}: waited {waited:.1f} s for {what} with key {key!r} "
            f"(messages waiting: {show_depths(self.depth())}). The {other} is slow, stuck or dead: "
            "look at its log and stack, or allow a longer timeout."
        )

    def _check_open(self) -> None:
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
        return _reassemble, (type(self), self.name, tuple(self._lanes), [reduction.DupFd(fd) for fd in self._fds])


def _reassemble(
    cls: type[SharedMemoryChannel], name: str, keys: tuple[Hashable, ...], inherited: list[Any]
) -> SharedMemoryChannel:
    fds = [fd.detach() for fd in inherited]
    for fd in fds:
        os.set_inheritable(fd, False)
    channel = cls.__new__(cls)
    channel._assemble(name, keys, fds)
    return channel


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
