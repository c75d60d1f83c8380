"""The gateway: credits, lanes that are emptied while messages are under way, one transfer for several lanes."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import pytest

from embodied_rl.channel import base, network, wire
from embodied_rl.channel.base import ChannelTimeout, run_blocking
from embodied_rl.channel.codec import encode
from embodied_rl.channel.network import Gate, NetworkChannel, RemoteLane, serve_lane
from embodied_rl.channel.shared_memory import SharedMemoryChannel

TOKEN = b"token" * 7
CAPACITY = 3


class There:
    """A node with the lanes 0 and 1 of a channel, and its gateways."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.channel = SharedMemoryChannel("there", [0, 1], capacity, mp.get_context("spawn"))
        self.gates = [Gate(self.channel, key, capacity) for key in (0, 1)]
        self._listener = wire.listen("127.0.0.1")
        self.address: wire.Address = self._listener.getsockname()[:2]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            number = wire.admit(sock, TOKEN).second
            self.connections += 1
            threading.Thread(target=serve_lane, args=(sock, number, self.gates), daemon=True).start()

    def lane(self, number: int = 0) -> RemoteLane:
        """A writer's end."""
        return RemoteLane("there", number, self.address, TOKEN, wire.Hello(network.LANE, 0, number))

    def waiting(self, number: int = 0) -> int:
        return self.channel.depth()[number]

    def get(self, number: int = 0) -> Any:
        return run_blocking(self.channel.get(key=number, timeout=10))

    def close(self) -> None:
        self.channel.close("the test is over")
        self._listener.close()


@pytest.fixture
def there() -> Iterator[There]:
    there = There()
    yield there
    there.close()


@pytest.fixture(autouse=True)
def first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "epoch", 0)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def fill(writer: RemoteLane) -> int:
    """Messages that it takes until the lane is full."""
    for sent in range(100):
        try:
            writer.put(sent, 0.3)
        except ChannelTimeout:
            return sent
    raise AssertionError("it never ends")


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_lane_holds_as_many_as_it_may_however_many_write(capacity: int) -> None:
    """Writers on other nodes and one on the lane's: with two that fell silent while places were reserved for them."""
    there = There(capacity)
    try:
        silent = [there.lane() for _ in range(2)]
        for lane in silent:
            lane.put("hello", 10)
            assert there.get() == "hello"
        writer = there.lane()
        for number in range(2 * capacity):  # one at a time goes through
            writer.put(number, 10)
            assert there.get() == number
            run_blocking(there.channel.put(number, timeout=10))
            assert there.get() == number
        sent = fill(writer)
        assert 1 <= sent <= capacity
        assert soon(lambda: there.waiting() == sent)
        assert [there.get() for _ in range(sent)] == list(range(sent))
        writer.put("at last", 10)
        assert there.get() == "at last"
    finally:
        there.close()


def test_all_places_serve_a_writer_alone(there: There) -> None:
    writer = there.lane()
    for number in range(CAPACITY):
        writer.put(number, 10)
    assert soon(lambda: there.waiting() == CAPACITY)
    with pytest.raises(ChannelTimeout, match=r"room for a message with key 0 on node 127\.0\.0\.1"):
        writer.put("one too many", 0.2)
    assert [there.get() for _ in range(CAPACITY)] == list(range(CAPACITY))


def test_writers_that_go_leave_their_places(there: There) -> None:
    for number in range(3 * CAPACITY):
        writer = there.lane()
        writer.put(number, 10)
        assert there.get() == number
        writer.close()
    lasting = there.lane()
    for number in range(CAPACITY):
        lasting.put(number, 10)
    assert soon(lambda: there.waiting() == CAPACITY)


def test_a_message_under_way_when_the_lane_was_emptied_is_dropped(there: There) -> None:
    """Half of it had arrived."""
    old = encode({"rewards": np.arange(50_000.0)})
    sock = wire.connect(there.address, TOKEN, wire.Hello(network.LANE, 0, 0))
    assert sock.recv(1) == b"+"
    data = b"".join(bytes(part) for part in [network._HEADER.pack(old.nbytes, 0, 0), *old.parts()])
    sock.sendall(data[:1000])
    for gate in there.gates:
        gate.reset(1)
    sock.sendall(data[1000:])
    assert sock.recv(1) == b"+", "its place is free again"
    assert there.waiting() == 0
    base.epoch = 1
    writer = there.lane()
    for number in range(CAPACITY - 1):  # the other connection keeps one
        writer.put(number, 10)
        assert there.get() == number
    sock.close()


def test_emptied_lanes_have_all_their_places_once(there: There) -> None:
    writer = there.lane()
    for round_ in range(4):
        base.epoch = round_
        for gate in there.gates:
            gate.reset(round_)
        for number in range(CAPACITY):
            writer.put((round_, number), 10)
        with pytest.raises(ChannelTimeout):
            writer.put("one too many", 0.2)
        assert soon(lambda: there.waiting() == CAPACITY)


def test_what_several_lanes_of_a_node_get_is_sent_to_it_once(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SharedMemoryChannel("there", ["mine"], CAPACITY, mp.get_context("spawn"))
    routes: dict[Hashable, network.Route] = {
        number: (there.address, wire.Hello(network.LANE, 0, number)) for number in (0, 1)
    }
    channel = NetworkChannel(here, routes, TOKEN)
    sent, send = [], wire.send_parts

    def count(sock: socket.socket, parts: list[Any]) -> None:
        sent.append(sum(len(part) for part in parts))
        send(sock, parts)

    monkeypatch.setattr(wire, "send_parts", count)
    weights = np.arange(100_000.0)
    for version in range(3):
        run_blocking(channel.put_all({"version": version, "weights": weights}, keys=[0, "mine", 1], timeout=10))
    assert there.connections == 1
    assert len(sent) == 3
    assert sum(sent) < 3.01 * weights.nbytes
    for version in range(3):
        for found in (there.get(0), there.get(1), run_blocking(here.get(key="mine"))):
            assert found["version"] == version
            np.testing.assert_array_equal(found["weights"], weights)
    assert there.waiting(0) == there.waiting(1) == 0


@pytest.mark.parametrize(("copies", "credit"), [((7,), True), ((), False)])
def test_a_writer_that_breaks_the_rules_is_hung_up_on(there: There, copies: tuple[int, ...], credit: bool) -> None:
    """It names a lane that there is not, or writes more than it may."""
    sock = wire.connect(there.address, TOKEN, wire.Hello(network.LANE, 0, 0))
    message = encode("hello")
    data = b"".join(bytes(part) for part in message.parts())
    header = network._HEADER.pack(message.nbytes, 0, len(copies)) + b"".join(n.to_bytes(4, "little") for n in copies)
    sock.settimeout(20)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(1 if credit else 10 * CAPACITY):
            sock.sendall(header + data)
        while sock.recv(100):
            pass
    assert there.waiting() <= CAPACITY
    sock.close()
    if credit:
        there.lane().put("others may", 10)
        assert there.get() == "others may"


@pytest.mark.parametrize("parts", [1, 7, 100_000])
def test_what_a_connection_brings_is_taken_apart_however_it_comes(parts: int) -> None:
    """Headers of 16 bytes and bodies around the size that is read at once, sent in pieces of so many bytes."""
    ours, theirs = socket.socketpair()
    inbox, random = network._Inbox(theirs), np.random.default_rng(0)
    sizes = [0, 1, 1024, *range(network._Inbox.SIZE - 17, network._Inbox.SIZE + 2), 60_000, 3]
    bodies = [random.bytes(size) for size in (sizes[:6] if parts == 1 else sizes)]
    whole = b"".join(bytes([number] * 16) + body for number, body in enumerate(bodies))

    def send() -> None:
        for start in range(0, len(whole), parts):
            ours.sendall(whole[start : start + parts])
        ours.close()

    threading.Thread(target=send, daemon=True).start()
    for number, body in enumerate(bodies):
        assert inbox.take(16) == bytes([number] * 16)
        memory = bytearray(len(body))
        inbox.fill(memoryview(memory))
        assert memory == body
    with pytest.raises(EOFError):
        inbox.take(1)


def test_who_asks_and_cancels_at_once_is_answered(there: There) -> None:
    """The gateway reads both together, while the lane is full, so that nothing tells it later."""
    filler = there.lane()
    assert fill(filler) == CAPACITY
    sock = wire.connect(there.address, TOKEN, wire.Hello(network.LANE, 0, 0))
    sock.settimeout(10)
    sock.sendall(network._ASK + network._CANCEL)
    assert sock.recv(10) == b"x"
    there.get()
    sock.sendall(network._ASK)
    assert sock.recv(10) == b"+"


def test_places_for_small_messages_are_offered_two_at_a_time(there: There) -> None:
    sock = wire.connect(there.address, TOKEN, wire.Hello(network.LANE, 0, 0))
    sock.settimeout(10)
    assert sock.recv(10) == b"++"

    def send(item: Any) -> None:
        encoded = encode(item)
        wire.send_parts(sock, [network._HEADER.pack(encoded.nbytes, 0, 0), *encoded.parts()])

    send("small")
    assert there.get() == "small"
    sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        sock.recv(10)
    sock.settimeout(10)
    send(np.zeros(100_000, np.uint8))
    assert sock.recv(10) == b"++", "none is left"
    assert len(there.get()) == 100_000
    send(np.zeros(100_000, np.uint8))
    assert sock.recv(10) == b"+", "a large one is under way while the next is received"
