"""The channel of the serial backend: all workers in one thread."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from embodied_rl.channel.base import ChannelClosed, check_capacity, check_count, show_depths
from embodied_rl.channel.codec import decode, encode
from embodied_rl.channel.cooperative import until

T = TypeVar("T")


class InProcessChannel:
    """Lanes that suspend the worker's coroutine where :class:`SharedMemoryChannel` blocks its process.

    Messages are copied by the same codec, so that a sender that reuses its buffers or updates its weights in place
    behaves alike in both. Timeouts are accepted and have no effect: while one worker waits, the others run, and when
    none can go on the scheduler raises ``DeadlockError`` at once. A key needs no declaration.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """
        Args:
            name: for error messages.
            capacity: messages that may wait in each lane.
        """
        check_capacity(name, capacity)
        self.name, self.capacity = name, capacity
        self._lanes: defaultdict[Hashable, deque[np.ndarray]] = defaultdict(deque)
        self._closed = False
        self._error: str | None = None

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        encoded = encode(item)
        memory = np.empty(encoded.nbytes, np.uint8)
        encoded.write(memory)
        lane = self._lanes[key]
        # A loop, because another producer may take the room between the scheduler's check and our turn.
        while len(lane) >= self.capacity and not self._closed:
            await until(lambda: len(lane) < self.capacity or self._closed, self._wait("room", key))
        self._check_open()
        lane.append(memory)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        return decode(await self._take(key))

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        return use(decode(await self._take(key), borrow=True))

    async def _take(self, key: Hashable) -> np.ndarray:
        lane = self._lanes[key]
        while not lane and not self._closed:
            await until(lambda: bool(lane) or self._closed, self._wait("a message", key))
        self._check_open()
        return lane.popleft()

    async def get_batch(self, n: int, *, key: Hashable = 0, timeout: float | None = None) -> list[Any]:
        check_count(self.name, n)
        return [await self.get(key=key) for _ in range(n)]

    def close(self, error: str | None = None) -> None:
        if not self._closed:
            self._closed, self._error = True, error

    def depth(self) -> dict[Hashable, int]:
        return {key: len(lane) for key, lane in self._lanes.items()}

    def _wait(self, what: str, key: Hashable) -> str:
        return f"{what} in channel {self.name!r} for key {key!r} (messages waiting: {show_depths(self.depth())})"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(self.name, self._error)
