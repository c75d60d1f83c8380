"""The interface of channels, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

RESERVED: Final = 2
"""Places of a lane that are reserved for each writer on another node, at most, even if it has nothing to send: it can
send one message while another is received. A lane that must hold messages of all of them unread needs room for both."""


def _nobody(what: str | None) -> None:
    del what


on_wait: Callable[[str | None], None] = _nobody
"""Told what this process has waited for a while for, and None when that is over. A worker tells its driver, for which
one that waits is none that hangs."""


over_nodes: dict[int, Channel] = {}
"""This process' ends of channels over several nodes, by their numbers."""


epoch: int = 0
"""How often the run has emptied lanes over several nodes, as of this process' present call."""


class ChannelClosed(RuntimeError):
    """Somebody closed the channel; nothing goes in or out any more, messages still waiting are given up."""

    def __init__(self, name: str, error: str | None) -> None:
        super().__init__(f"channel {name!r} was closed" + (f" because of an error:\n{error}" if error else ""))
        self.name, self.error = name, error

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's default is to call the class with the message only.
        return ChannelClosed, (self.name, self.error)


class ChannelTimeout(TimeoutError):
    """A put found no room, or a get no message, within its timeout."""


class Channel(Protocol):
    """Bounded FIFO lanes of messages, one lane a key.

    A message is any nesting of dataclasses, dicts, lists, tuples, torch tensors on the CPU, numpy arrays and picklable
    values. What is received is a copy of what the message was when it was put, and belongs to the receiver.
    """

    name: str

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        """Append ``item`` to the key's lane, waiting while the lane is full.

        Args:
            timeout: seconds to wait for room; None waits for ever.

        Raises:
            ChannelTimeout, ChannelClosed.
            KeyError: the key was not declared.
            TypeError: the item cannot be sent; the message says what in it cannot.
        """
        ...

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        """As ``put`` for each key, but encoded once, and sent once to each node."""
        ...

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        """Take the oldest message of the key's lane, waiting while there is none. Raises as ``put`` does."""
        ...

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        """As ``use(await get(...))``, with one copy less: the message's large tensors and arrays are the channel's own,
        for ``use`` alone. It must copy what it keeps, and not change them.
        """
        ...

    async def get_batch(self, n: int, *, key: Hashable = 0, timeout: float | None = None) -> list[Any]:
        """Take exactly ``n`` messages of the key's lane, oldest first; ``timeout`` is for all of them together.

        ``n`` may exceed the capacity. If the timeout strikes part way, those already taken are not lost: the next get
        of this process returns them first.
        """
        ...

    def close(self, error: str | None = None) -> None:
        """End every put and get, blocked or future, in every process, with :class:`ChannelClosed` and ``error``.

        Any process may close, any number of times; the first error text counts.
        """
        ...

    def reset(self, keys: Sequence[Hashable]) -> None:
        """Empty these lanes, whoever was killed while they were in use. For the process that made the channel, while
        nobody uses them."""
        ...

    def depth(self) -> dict[Hashable, int]:
        """Messages waiting in each lane."""
        ...


def check_capacity(name: str, capacity: int, at_most: float = float("inf")) -> None:
    if not 1 <= capacity <= at_most:
        raise ValueError(f"channel {name!r}: got capacity {capacity}, expected 1 to {at_most} messages a key")


def check_count(name: str, n: int) -> None:
    if n < 1:
        raise ValueError(f"channel {name!r}: got get_batch({n}), expected at least 1 message")


def show_depths(depths: Mapping[Hashable, int]) -> str:
    return ", ".join(f"{key!r}: {waiting}" for key, waiting in depths.items()) or "none"


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose channels block, as in a worker's own process.

    Raises:
        RuntimeError: it suspended, so it awaited an in-process channel outside the serial backend.
    """
    try:
        waiting = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError(f"waited for {getattr(waiting, 'what', waiting)} outside the serial backend's scheduler")
