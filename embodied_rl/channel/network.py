"""The channel between nodes.

A lane lies in shared memory on the node of its reader, who does not notice that there are other nodes. A writer on
another node has a TCP connection to that node's *gateway*, a thread there for each writer and lane, which receives
messages into places of the lane, large ones straight: so the lane's bound, order and errors are those of shared memory.
The gateway reserves places ahead and tells the writer of each, a *credit*, so that a message does not wait for an
answer::

    writer                                        gateway
                                               ◄─ "++" (two places are reserved)
    header, message                            ─► receives it into the place, appends the place to the lane
                                               ◄─ "+"  (another, if the lane has room; "++" after
                                                    two small messages)
    _ASK, where it has no credit               ─► waits for a place
                                               ◄─ "+"

A writer that waits no longer sends ``_CANCEL`` and reads until the gateway's ``x``, which takes its credits back.
A put may return before its message is in the lane. So that a message which was under way when lanes were emptied is not
taken for a new one, its header bears the *epoch* in which it was sent; a :class:`Gate` drops those of an older one. The
header also names lanes of the same node that get a copy each, so that what all of a node's workers get goes there once.
The message's bytes are the codec's; they are pickled, so what guards them is the run's token (``wire.py``).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

from embodied_rl.channel import base, wire
from embodied_rl.channel.base import ChannelClosed, ChannelTimeout
from embodied_rl.channel.codec import Bytes, encode
from embodied_rl.channel.shared_memory import SharedMemoryChannel, wait_readable

T = TypeVar("T")

LANE: Final = 2
"""Kind of a connection (:class:`~embodied_rl.channel.wire.Hello`) to a lane: its channel's number, its key's."""
_HEADER: Final = struct.Struct("<QII")
"""Bytes of the message, epoch, number of copies, of whose lanes the numbers follow."""
_NUMBER: Final = struct.Struct("<I")
_ASK, _CANCEL = _HEADER.pack(2**64 - 1, 0, 0), _HEADER.pack(2**64 - 2, 0, 0)
_CREDIT, _CANCELLED, _CLOSED = b"+", b"x", b"!"
_QUIET_S: Final = 1.0
"""Seconds of waiting of which nobody is told."""


class RemoteLane:
    """The writer's end of a lane on another node. Connects with the first message.

    Args:
        closed: (file descriptor that is readable when the channel is closed on this node, raises then); None where
            nobody but this process closes it.
    """

    def __init__(
        self,
        channel: str,
        key: Hashable,
        address: wire.Address,
        token: bytes,
        hello: wire.Hello,
        closed: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        self._channel, self._key, self._address, self._token, self._hello = channel, key, address, token, hello
        self._closed, self._sock, self._one = closed, None, threading.Lock()
        self._credits = 0

    def put(self, item: Any, timeout: float | None, copies: Sequence[int] = ()) -> None:
        """See :meth:`~embodied_rl.channel.base.Channel.put`.

        Args:
            copies: numbers of other lanes of the channel on the same node that get the message, too.
        """
        encoded = encode(item)
        header = [_HEADER.pack(encoded.nbytes, base.epoch, len(copies)), struct.pack(f"<{len(copies)}I", *copies)]
        started = time.monotonic()
        with self._one:
            self._check_open()
            try:
                self._send([*header, *encoded.parts()], started, timeout)
            except ChannelTimeout:
                raise
            except BaseException as error:  # half-way through a message: no other can follow
                self.close()
                if not isinstance(error, (OSError, EOFError)):
                    raise
                self._check_open()
                raise ChannelClosed(
                    self._channel, f"the connection to the node {self._address[0]} broke ({error or 'it closed'})"
                ) from error

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock, self._credits = None, 0

    def _send(self, parts: list[Any], started: float, timeout: float | None) -> None:
        if self._sock is None:
            self._sock = wire.connect(self._address, self._token, self._hello)
        if not self._credits:
            with contextlib.suppress(BlockingIOError):
                self._hear(self._sock.recv(4096, socket.MSG_DONTWAIT))
        if not self._credits:
            self._sock.sendall(_ASK)
            self._wait_for_room(self._sock, started, timeout)
        self._credits -= 1
        wire.send_parts(self._sock, parts)

    def _hear(self, words: bytes) -> bytes:
        if not words or _CLOSED in words:
            raise EOFError("it has closed the channel" if words else "")
        self._credits += words.count(_CREDIT)
        return words

    def _wait_for_room(self, sock: socket.socket, started: float, timeout: float | None) -> None:
        """Wait for a credit.

        Raises:
            ChannelTimeout: there is none in time. None will come for what was asked.
        """
        announced, fds = False, (sock.fileno(), *(self._closed[:1] if self._closed else ()))
        try:
            while not self._credits:
                now = time.monotonic()
                left = None if timeout is None else started + timeout - now
                if left is not None and left <= 0:
                    self._cancel(sock)
                    raise ChannelTimeout(
                        f"channel {self._channel!r}: waited {now - started:.1f} s for room for a message with key "
                        f"{self._key!r} on node {self._address[0]}. The consumer is slow, stuck or dead: look at its "
                        "log and stack, or allow a longer timeout."
                    )
                if not announced and now - started >= _QUIET_S:
                    announced = True
                    base.on_wait(f"room for a message of channel {self._channel!r} with key {self._key!r}")
                if not announced:
                    left = min(started + _QUIET_S - now, _QUIET_S if left is None else left)
                if sock.fileno() in wait_readable(fds, left):
                    self._hear(sock.recv(4096))
                self._check_open()
        finally:
            if announced:
                base.on_wait(None)

    def _cancel(self, sock: socket.socket) -> None:
        sock.sendall(_CANCEL)
        while _CANCELLED not in self._hear(sock.recv(4096)):
            pass
        self._credits = 0

    def _check_open(self) -> None:
        if self._closed is not None:
            self._closed[1]()


class NetworkChannel:
    """A worker's end of a channel over several nodes; see :class:`~embodied_rl.channel.base.Channel`.

    Args:
        here: the lanes of this node, and the closed flag of all.
        elsewhere: the lanes of other nodes, for writing.
    """

    def __init__(self, here: SharedMemoryChannel, elsewhere: Mapping[Hashable, Route], token: bytes) -> None:
        self.name = here.name
        self._here, self._token = here, token
        self._routes = elsewhere
        self._elsewhere = {
            key: RemoteLane(here.name, key, route[0], token, route[1], (here.closed_fd, here.check_open))
            for key, route in elsewhere.items()
        }

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        if key in self._elsewhere:
            self._elsewhere[key].put(item, timeout)
        else:
            await self._here.put(item, key=key, timeout=timeout)

    async def put_all(self, item: Any, *, keys: Sequence[Hashable], timeout: float | None = None) -> None:
        await self._here.put_all(item, keys=[key for key in keys if key not in self._routes], timeout=timeout)
        put_all_remote(item, {key: self._routes[key] for key in keys if key in self._routes}, self._elsewhere, timeout)

    async def get(self, *, key: Hashable = 0, timeout: float | None = None) -> Any:
        return await self._here.get(key=self._mine(key), timeout=timeout)

    async def read(self, use: Callable[[Any], T], *, key: Hashable = 0, timeout: float | None = None) -> T:
        return await self._here.read(use, key=self._mine(key), timeout=timeout)

    async def get_batch(self, n: int, *, key: Hashable = 0, timeout: float | None = None) -> list[Any]:
        return await self._here.get_batch(n, key=self._mine(key), timeout=timeout)

    def close(self, error: str | None = None) -> None:
        self._here.close(error)  # this node's agent tells the others

    def reset(self, keys: Sequence[Hashable]) -> None:
        self._here.reset(keys)

    def depth(self) -> dict[Hashable, int]:
        """Of this node's lanes."""
        return self._here.depth()

    def _mine(self, key: Hashable) -> Hashable:
        if key in self._elsewhere:
            raise KeyError(f"channel {self.name!r}: messages with key {key!r} are read on {self._routes[key][0][0]}")
        return key

    def __reduce__(self) -> tuple[Any, ...]:
        return NetworkChannel, (self._here, self._routes, self._token)


Route = tuple[wire.Address, wire.Hello]
"""Where a lane of another node is written to."""


def put_all_remote(
    item: Any, routes: Mapping[Hashable, Route], lanes: Mapping[Hashable, RemoteLane], timeout: float | None
) -> None:
    """Put a message into several lanes, sent once to each node."""
    nodes: dict[wire.Address, list[Hashable]] = {}
    for key, (address, _) in routes.items():
        nodes.setdefault(address, []).append(key)
    for first, *others in nodes.values():
        lanes[first].put(item, timeout, [routes[key][1].second for key in others])


class Gate:
    """One of this node's lanes, for its gateways: threads that may take places of it for messages to come.

    Ahead of messages it gives away all places but one, so that one goes round among those who write now.
    """

    def __init__(self, channel: SharedMemoryChannel, key: Hashable, capacity: int) -> None:
        self._channel, self._key, self._capacity = channel, key, capacity
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._epoch = 0

    def ahead(self) -> int | None:
        """A place, if there is one and another is left."""
        with self._lock:
            return self._take() if len(self._held) < self._capacity - 1 else None

    def reserve(self, stop: int | None) -> int | None:
        """A place; None if ``stop``, a file descriptor, can be read before there is one."""
        while True:
            with self._lock:
                slot = self._take()
            if slot is not None or self._channel.wait_for_room(self._key, stop):
                return slot

    def _take(self) -> int | None:
        slot = self._channel.take_free(self._key)
        if slot is not None:
            self._held.add(slot)
        return slot

    def copy(self, source: Bytes, epoch: int) -> None:
        """Append a message that another lane got, when there is room."""
        slot = self.reserve(stop=None)
        assert slot is not None
        self.window(slot, len(source))[: len(source)] = source
        self.commit(slot, len(source), epoch)

    def window(self, slot: int, nbytes: int) -> Bytes:
        """The memory of a place."""
        return self._channel.window(slot, nbytes)

    def commit(self, slot: int, nbytes: int, epoch: int) -> None:
        """A message is in the place: append it to the lane, unless the lane was emptied since it was sent."""
        with self._lock:
            self._held.discard(slot)
            if epoch >= self._epoch:
                self._channel.commit(self._key, slot, nbytes)
            else:
                self._channel.give_back(self._key, slot)

    def give_back(self, slot: int) -> None:
        """The place is not needed."""
        with self._lock:
            self._held.discard(slot)
            self._channel.give_back(self._key, slot)

    def reset(self, epoch: int) -> None:
        """Empty the lane; the gateways keep the places that they have."""
        with self._lock:
            self._epoch = epoch
            self._channel.reset([self._key], but=self._held)


def serve_lane(sock: socket.socket, number: int, gates: Sequence[Gate | None]) -> None:
    """The gateway's side of one connection, until the writer is gone or the channel is closed.

    Args:
        number: of the lane.
        gates: of the channel's lanes; None: it is not of this node.
    """
    slots: list[int] = []
    gate = gates[number]
    if gate is None:
        sock.close()
        return
    try:
        with contextlib.suppress(OSError, EOFError), sock:
            inbox = _Inbox(sock)
            try:
                while True:
                    _offer(sock, gate, slots)
                    # While small ones come, places are offered together when none is left: fewer system calls.
                    while _serve_message(sock, inbox, gate, gates, slots) <= _Inbox.SIZE and slots:
                        pass
            except ChannelClosed:
                sock.sendall(_CLOSED)
    finally:
        for slot in slots:
            gate.give_back(slot)


class _Inbox:
    """What a connection brought, read with as few system calls as can be."""

    SIZE: Final = 16 * 1024

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._memory = sock, memoryview(bytearray(self.SIZE))
        self._start = self._end = 0

    @property
    def pending(self) -> bool:
        """Whether there is more than was taken."""
        return self._start < self._end

    def take(self, count: int) -> bytes:
        """The next bytes, fewer than ``SIZE``. Raises EOFError when the other end closed."""
        if self._end - self._start < count and self._start + count > self.SIZE:
            rest = bytes(self._memory[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._memory[: self._end] = rest
        while self._end - self._start < count:
            received = self._sock.recv_into(self._memory[self._end :])
            if not received:
                raise EOFError
            self._end += received
        self._start += count
        found = bytes(self._memory[self._start - count : self._start])
        if not self.pending:
            self._start = self._end = 0
        return found

    def fill(self, memory: memoryview) -> None:
        """The next bytes into ``memory``. Raises as :meth:`take`."""
        count = min(len(memory), self._end - self._start)
        memory[:count] = self._memory[self._start : self._start + count]
        self._start += count
        if not self.pending:
            self._start = self._end = 0
        wire.receive_into(self._sock, memory[count:])


def _offer(sock: socket.socket, gate: Gate, slots: list[int]) -> None:
    """Reserve places ahead and tell the writer."""
    had = len(slots)
    while len(slots) < base.RESERVED and (slot := gate.ahead()) is not None:
        slots.append(slot)
    if len(slots) > had:
        sock.sendall(_CREDIT * (len(slots) - had))


def _serve_message(
    sock: socket.socket, inbox: _Inbox, gate: Gate, gates: Sequence[Gate | None], slots: list[int]
) -> int:
    """One message of the writer; returns its bytes.

    Args:
        slots: the places that are reserved for it.
    """
    while (header := inbox.take(_HEADER.size)) in (_ASK, _CANCEL):
        if header == _CANCEL:
            while slots:
                gate.give_back(slots.pop())
            sock.sendall(_CANCELLED)
        # Who asked and has sent more has cancelled.
        elif not slots and not inbox.pending and (slot := gate.reserve(stop=sock.fileno())) is not None:
            slots.append(slot)
            sock.sendall(_CREDIT)
    nbytes, epoch, copies = _HEADER.unpack(header)
    if nbytes > SharedMemoryChannel.LARGEST or copies > len(gates) or not slots:
        raise EOFError
    others = [_NUMBER.unpack(inbox.take(_NUMBER.size))[0] for _ in range(copies)]
    message = gate.window(slots[0], nbytes)[:nbytes]
    inbox.fill(message.data)
    for other in others:
        if other >= len(gates) or (copy := gates[other]) is None:
            raise EOFError
        copy.copy(message, epoch)
    gate.commit(slots.pop(0), nbytes, epoch)
    return nbytes


def end_of(number: int) -> base.Channel:
    """This process' end of a channel, by its number: what the driver's end is pickled to."""
    return base.over_nodes[number]
