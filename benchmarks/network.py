"""The channel between nodes against plain TCP, over loopback: ``python -m benchmarks.network``.

Throughput: 10 MiB dicts of eight tensors one way. Round trip: 1 KiB there and back. Plain TCP sends the same number of
bytes and decodes nothing. A line for each of ``--repeats``, since loopback varies.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import socket
import threading
import time
from multiprocessing.connection import Connection

import torch

from embodied_rl.channel import wire
from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.network import RemoteLane, serve_lane
from embodied_rl.channel.shared_memory import SharedMemoryChannel

TOKEN = b"benchmark" * 4
SMALL, LARGE = 1024, 10 * 2**20


def gateway(channel: SharedMemoryChannel) -> wire.Address:
    """Serve the channel's lane at the address."""
    listener = wire.listen("127.0.0.1")

    def serve() -> None:
        sock, _ = listener.accept()
        wire.admit(sock, TOKEN)
        serve_lane(sock, channel, 0)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[:2]


def lane_at(address: wire.Address) -> RemoteLane:
    return RemoteLane("benchmark", 0, address, TOKEN, wire.Hello(2))


def other_node(pipe: Connection, count: int, trips: int) -> None:
    """Takes the large messages, then sends each small one back; by the channel, then by plain TCP."""
    channel = SharedMemoryChannel("there", [0], 4, mp.get_context("spawn"))
    pipe.send(gateway(channel))
    back = lane_at(pipe.recv())
    for _ in range(count):
        run_blocking(channel.get())
    back.put(0, None)
    for _ in range(trips):
        back.put(run_blocking(channel.get()), None)
    with socket.create_connection(pipe.recv()) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = memoryview(bytearray(LARGE))
        for _ in range(count):
            wire.receive_into(sock, memory)
        sock.sendall(b"x")
        for _ in range(trips):
            wire.receive_into(sock, memory[:SMALL])
            sock.sendall(memory[:SMALL])


def measure(count: int, trips: int) -> tuple[float, float, float, float]:
    """MiB/s and ms of a round trip: the channel's, then plain TCP's."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=other_node, args=(theirs, count, trips))
    process.start()
    there = lane_at(ours.recv())
    here = SharedMemoryChannel("here", [0], 4, mp.get_context("spawn"))
    ours.send(gateway(here))
    large = {f"tensor {i}": torch.zeros(LARGE // 8, dtype=torch.uint8) for i in range(8)}
    small, start = torch.zeros(SMALL, dtype=torch.uint8), time.perf_counter()
    for _ in range(count):
        there.put(large, None)
    run_blocking(here.get())
    speed, start = count * LARGE / 2**20 / (time.perf_counter() - start), time.perf_counter()
    for _ in range(trips):
        there.put(small, None)
        run_blocking(here.get())
    trip = (time.perf_counter() - start) / trips * 1e3
    listener = wire.listen("127.0.0.1")
    ours.send(listener.getsockname()[:2])
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, start = memoryview(bytearray(LARGE)), time.perf_counter()
    for _ in range(count):
        sock.sendall(data)
    wire.receive_into(sock, data[:1])
    plain, start = count * LARGE / 2**20 / (time.perf_counter() - start), time.perf_counter()
    for _ in range(trips):
        sock.sendall(data[:SMALL])
        wire.receive_into(sock, data[:SMALL])
    plain_trip = (time.perf_counter() - start) / trips * 1e3
    process.join()
    return speed, trip, plain, plain_trip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--trips", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    print("channel MiB/s | plain TCP MiB/s | channel round trip ms | plain TCP round trip ms")
    for _ in range(asked.repeats):
        speed, trip, plain, plain_trip = measure(asked.messages, asked.trips)
        print(f"{speed:.0f} | {plain:.0f} | {trip:.3f} | {plain_trip:.3f}", flush=True)


if __name__ == "__main__":
    main()
