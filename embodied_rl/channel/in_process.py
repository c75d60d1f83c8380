"""The channel and the scheduler of the serial backend: all workers in one thread.

Worker methods that exchange messages are coroutines. In a process of its own a worker's coroutine never suspends,
since its channels block; here a channel that has nothing to give awaits :func:`until`, and the scheduler lets the
other workers run. So both backends run the same code, and a debugger sees one thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from embodied_rl.channel.base import ChannelClosed, check_capacity, check_count, show_depths
from embodied_rl.channel.codec import decode, encode

T = TypeVar("T")


class _Loan:
    """A message that is lent."""

    def __init__(self, item: Any, readers: int) -> None:
        self.item, self.readers = item, readers


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
        self._lanes: defaultdict[Hashable, deque[np.ndarray | _Loan]] = defaultdict(deque)
        self._closed = False
        self._error: str | None = None

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        await self._append(_encoded(item), key)

    async def lend(self, item: Any, *, keys: Sequence[Hashable]) -> None:
        """As ``put_all``, but nothing is copied: what :meth:`read` gives the readers is the item's, on whichever device
        it is. Returns when all have read it; it must not be changed before."""
        loan = _Loan(item, len(keys))
        for key in keys:
            await self._append(loan, key)
        await until(lambda: not loan.readers or self._closed, f"readers of what channel {self.name!r} lends")
        self._check_open()

    async def _append(self, message: np.ndarray | _Loan, key: Hashable) -> None:
        lane = self._lanes[key]
        # A loop, because another producer may take the room between the scheduler's check and our turn.
        while len(lane) >= self.capacity and not self._closed:
            await until(lambda: len(lane) < self.capacity or self._closed, self._wait("room", key))
        self._check_open()
        lane.append(message)

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        for key in keys:
            await self.put(item, key=key, timeout=timeout)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        message = await self._take(key)
        if isinstance(message, _Loan):
            message.readers -= 1
            message = _encoded(message.item)
        return decode(message)

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        message = await self._take(key)
        if not isinstance(message, _Loan):
            return use(decode(message, borrow=True))
        try:
            return use(message.item)
        finally:
            message.readers -= 1

    async def _take(self, key: Hashable) -> np.ndarray | _Loan:
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

    def reset(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            for message in self._lanes.pop(key, ()):
                if isinstance(message, _Loan):
                    message.readers -= 1

    def depth(self) -> dict[Hashable, int]:
        return {key: len(lane) for key, lane in self._lanes.items()}

    def _wait(self, what: str, key: Hashable) -> str:
        return f"{what} in channel {self.name!r} for key {key!r} (messages waiting: {show_depths(self.depth())})"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(self.name, self._error)


def _encoded(item: Any) -> np.ndarray:
    encoded = encode(item)
    memory = np.empty(encoded.nbytes, np.uint8)
    encoded.write(memory)
    return memory


class DeadlockError(RuntimeError):
    """Every coroutine waits for something that only another coroutine could bring."""


class _Waiting:
    """A message from a suspended coroutine to the scheduler."""

    def __init__(self, ready: Callable[[], bool], what: str) -> None:
        self.ready, self.what = ready, what

    def __await__(self) -> Generator[_Waiting, None, None]:
        yield self


def until(ready: Callable[[], bool], what: str) -> Awaitable[None]:
    """Suspend until ``ready()`` is true. ``what`` names the wait in a deadlock's message."""
    return _Waiting(ready, what)


class Task:
    """A coroutine in the scheduler's care: finished when ``done``, then ``result`` or ``error`` is set."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, Any], before: Callable[[], None]) -> None:
        self.name, self.coroutine, self.before = name, coroutine, before
        self.waiting: _Waiting | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Run until the next wait or the end."""
        self.before()
        try:
            self.waiting = self.coroutine.send(None)
        except StopIteration as stop:
            self.done, self.result = True, stop.value
        except BaseException as error:
            self.done, self.error = True, error


class Scheduler:
    """Runs tasks in the order they were added, each as far as it can go. Deterministic."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Name of tasks -> CPU seconds of this process that they took."""

    def add(self, name: str, coroutine: Coroutine[Any, Any, Any], before: Callable[[], None] = lambda: None) -> Task:
        """Schedule a coroutine. ``before`` is called each time it is about to go on."""
        task = Task(name, coroutine, before)
        self.tasks.append(task)
        return task

    def run_until(self, task: Task) -> None:
        """Run all tasks until ``task`` is done. The first task that fails ends the run and its error is raised here.

        Raises:
            DeadlockError: no task can go on; the message lists who waits for what.
        """
        while not task.done:
            runnable = [t for t in self.tasks if t.waiting is None or t.waiting.ready()]
            if not runnable:
                waits = "\n".join(f"  {t.name} waits for {t.waiting.what if t.waiting else '?'}" for t in self.tasks)
                raise DeadlockError(f"no worker can go on:\n{waits}")
            try:
                for current in runnable:
                    began = time.process_time()
                    current.advance()
                    self.seconds[current.name] += time.process_time() - began
                    if current.error is not None:
                        raise current.error
            finally:
                self.tasks = [t for t in self.tasks if not t.done]
        if task.error is not None:  # it failed while another task was being waited for
            raise task.error

    def cancel(self) -> None:
        """Close every unfinished task's coroutine, also where one of them raises as it is closed."""
        with contextlib.ExitStack() as stack:
            while self.tasks:
                stack.callback(self.tasks.pop().coroutine.close)
