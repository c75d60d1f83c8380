"""Connections between the nodes of one run: TCP, and nothing is read before the other end has shown the run's token.

The two ends prove to each other, by HMAC-SHA256 over a random number of each, that they have the token, which is never
sent. What follows is neither encrypted nor signed: the nodes' network is trusted, as Ray trusts it (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from typing import Any, Final, NamedTuple

Address = tuple[str, int]

HANDSHAKE_S: Final = 10.0
"""Time for the two ends to know each other; longer than a busy node takes."""
_NONCE: Final = 32
_HELLO: Final = struct.Struct("<BII")
# A peer whose machine is gone says nothing: the kernel asks after 2 s, and gives up after 7.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 5}
_UNANSWERED_MS: Final = 8000
_JOINED: Final = 16 * 1024
"""Bytes up to which to join takes less than to keep apart."""


class Stranger(ConnectionError):
    """The other end does not have the run's token."""


class Hello(NamedTuple):
    """What a connection is for."""

    kind: int
    first: int = 0
    second: int = 0


def listen(host: str) -> socket.socket:
    """A listener on the interface that has the address ``host``, at a free port."""
    return socket.create_server((host, 0), backlog=1024)


def connect(address: Address, token: bytes, hello: Hello) -> socket.socket:
    """A connection to a listener that has the same token.

    Raises:
        OSError: nobody listens, or not in time; :class:`Stranger` where it is somebody else.
    """
    sock = socket.create_connection(address, HANDSHAKE_S)
    with _or_close(sock):
        deadline = time.monotonic() + HANDSHAKE_S
        theirs, ours = _exactly(sock, _NONCE, deadline), secrets.token_bytes(_NONCE)
        sock.sendall(ours + _proof(token, b"client", theirs, ours))
        if not hmac.compare_digest(_exactly(sock, _NONCE, deadline), _proof(token, b"server", theirs, ours)):
            raise Stranger(f"{address[0]}:{address[1]} is no node of this run")
        sock.sendall(_HELLO.pack(*hello))
        _settle(sock)
    return sock


def admit(sock: socket.socket, token: bytes) -> Hello:
    """The listener's part, for a connection that it has accepted, and closes when it raises as :func:`connect`."""
    with _or_close(sock):
        deadline = time.monotonic() + HANDSHAKE_S
        ours = secrets.token_bytes(_NONCE)
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(ours)
        answer = _exactly(sock, 2 * _NONCE, deadline)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(token, b"client", ours, theirs)):
            raise Stranger("a connection without the run's token")
        sock.sendall(_proof(token, b"server", ours, theirs))
        hello = Hello(*_HELLO.unpack(_exactly(sock, _HELLO.size, deadline)))
        _settle(sock)
    return hello


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill ``memory``. Raises EOFError when the other end closed."""
    while memory:
        count = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        memory = memory[count:]


def send_parts(sock: socket.socket, parts: list[Any]) -> None:
    """Send buffers one after the other, without joining them if they are large."""
    if sum(map(len, parts)) <= _JOINED:
        sock.sendall(b"".join(parts))
        return
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        sent = sock.sendmsg(views[:512])  # the kernel takes 1024 at once
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def _proof(token: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(token, role + server + client, "sha256")


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        received = sock.recv(count - len(data))
        if not received:
            raise Stranger("the other end closed the connection instead of showing the run's token")
        data += received
    return data


def _settle(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def _or_close(sock: socket.socket) -> Any:
    try:
        yield
    except BaseException:
        sock.close()
        raise
