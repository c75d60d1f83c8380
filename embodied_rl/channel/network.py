"""The channel between nodes.

A lane lies in shared memory on the node of its reader, who does not notice that there are other nodes. A writer on
another node has a TCP connection to that node's *gateway*, a thread there for each writer and lane, which takes a place
of the lane and puts the message into it: so the lane's bound, order and errors are those of shared memory. A message::

    writer                                  gateway
    length (uint64) [, message if small] ─►  waits for a place in the lane
                                         ◄─  "+"  (a small message is in the lane)
    _GO, message if large                ─►  receives it straight into the place

A writer that waits no longer sends ``_CANCEL`` and reads until the gateway's ``x``; a "+" before it had come too late
for a large message, whose place is given back, and in time for a small one, which is in the lane.
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
_INLINE: Final = 64 * 1024
"""Bytes up to which a message does not wait for the gateway's leave."""
_WORD: Final = struct.Struct("<Q")
_CANCEL: Final = _WORD.pack(2**64 - 1)
_GO: Final = _WORD.pack(2**64 - 2)
_TAKEN, _CANCELLED, _CLOSED = b"+", b"x", b"!"
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

    def put(self, item: Any, timeout: float | None) -> None:
        encoded = encode(item)
        started = time.monotonic()
        with self._one:
            self._check_open()
            try:
                self._send(encoded.parts(), encoded.nbytes, started, timeout)
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
            self._sock = None

    def _send(self, parts: list[Any], nbytes: int, started: float, timeout: float | None) -> None:
        if self._sock is None:
            self._sock = wire.connect(self._address, self._token, self._hello)
        sock, small = self._sock, nbytes <= _INLINE
        wire.send_parts(sock, [_WORD.pack(nbytes), *(parts if small else ())])
        if not self._placed(sock, started, timeout):
            sock.sendall(_CANCEL)
            word = _receive(sock, 1)
            if word == _TAKEN:
                word = _receive(sock, 1)
                if small:  # in time after all
                    return
            self._closed_there(word)
            raise ChannelTimeout(
                f"channel {self._channel!r}: waited {time.monotonic() - started:.1f} s for room for a message with key "
                f"{self._key!r} on node {self._address[0]}. The consumer is slow, stuck or dead: look at its log and "
                "stack, or allow a longer timeout."
            )
        self._closed_there(_receive(sock, 1))
        if not small:
            wire.send_parts(sock, [_GO, *parts])

    def _closed_there(self, word: bytes) -> None:
        if word == _CLOSED:
            raise EOFError("it has closed the channel")

    def _placed(self, sock: socket.socket, started: float, timeout: float | None) -> bool:
        """Wait for the gateway's answer; False: not in time."""
        announced, fds = False, (sock.fileno(), *(self._closed[:1] if self._closed else ()))
        try:
            while True:
                now = time.monotonic()
                left = None if timeout is None else started + timeout - now
                if left is not None and left <= 0:
                    return False
                if not announced and now - started >= _QUIET_S:
                    announced = True
                    base.on_wait(f"room for a message of channel {self._channel!r} with key {self._key!r}")
                if not announced:
                    left = min(started + _QUIET_S - now, _QUIET_S if left is None else left)
                ready = wait_readable(fds, left)
                if sock.fileno() in ready:
                    return True
                self._check_open()
        finally:
            if announced:
                base.on_wait(None)

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


def serve_lane(sock: socket.socket, channel: SharedMemoryChannel, key: Hashable) -> None:
    """The gateway's side of one connection, until the writer is gone or the channel is closed."""
    with contextlib.suppress(OSError, EOFError), sock:
        try:
            while True:
                _serve_message(sock, channel, key)
        except ChannelClosed:
            sock.sendall(_CLOSED)


def _serve_message(sock: socket.socket, channel: SharedMemoryChannel, key: Hashable) -> None:
    word = _receive(sock, _WORD.size)
    if word == _CANCEL:  # of a small message that is in the lane already
        sock.sendall(_CANCELLED)
        return
    (nbytes,) = _WORD.unpack(word)
    if nbytes > SharedMemoryChannel.LARGEST:
        raise EOFError
    body = _receive(sock, nbytes) if nbytes <= _INLINE else None
    slot = channel.reserve(key, stop=sock.fileno())
    if slot is None:  # the writer gave up or is gone
        _receive(sock, _WORD.size)
        sock.sendall(_CANCELLED)
        return
    kept = False
    try:
        window: Bytes = channel.window(slot, nbytes)
        if body is not None:
            window.data[:nbytes] = body
        else:
            sock.sendall(_TAKEN)
            if _receive(sock, _WORD.size) == _CANCEL:
                sock.sendall(_CANCELLED)
                return
            wire.receive_into(sock, window.data[:nbytes])
        channel.commit(key, slot, nbytes)
        kept = True
    finally:
        if not kept:
            channel.give_back(key, slot)
    if body is not None:
        sock.sendall(_TAKEN)


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    wire.receive_into(sock, memoryview(data))
    return bytes(data)


def end_of(number: int) -> base.Channel:
    """This process' end of a channel, by its number: what the driver's end is pickled to."""
    return base.over_nodes[number]
