"""The channel between nodes against plain TCP, over loopback: ``python -m benchmarks.network``.

Two agents on this machine, a worker on each. Throughput: 10 MiB dicts of eight tensors one way, taken by ``get``, which
copies them out of the lane, and by ``read``, which does not, as rollout workers take observations. Round trip: 1 KiB
there and back. Plain TCP connects the same two processes and sends as many bytes; its round trip is given with and
without the codec, since a message needs one. A line for each of ``--repeats``, since loopback varies.

``--ray`` has Ray carry the same messages, as arguments of an actor's calls through its object store, within a raylet
and from one to another.
"""

from __future__ import annotations

import argparse
import socket
import time
from typing import Any

import numpy as np
import torch

from embodied_rl.channel import wire
from embodied_rl.channel.base import Channel
from embodied_rl.channel.codec import decode, encode
from embodied_rl.runtime.cluster import ClusterHost
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import GroupSpec, Worker, WorkerContext
from tests.runtime.agents import LocalNodes

SMALL, LARGE, CAPACITY = 1024, 10 * 2**20, 4


class End(Worker):
    """Rank 0 sends to rank 1, which answers."""

    def __init__(self, context: WorkerContext, lanes: Channel) -> None:
        super().__init__(context)
        self.lanes, self.rank = lanes, context.rank
        self.plain: Any = None

    def listen(self) -> wire.Address | None:
        if self.rank == 0:
            return None
        self.plain = wire.listen("127.0.0.1")
        return self.plain.getsockname()[:2]

    def connect(self, address: wire.Address) -> None:
        self.plain = self.plain.accept()[0] if self.rank else socket.create_connection(address)
        self.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def throughput(self, count: int, borrow: bool) -> float:
        """MiB/s."""
        message = {f"tensor {i}": torch.zeros(LARGE // 8, dtype=torch.uint8) for i in range(8)}
        start = time.perf_counter()
        for _ in range(count):
            if self.rank == 0:
                await self.lanes.put(message, key=1)
            elif borrow:
                await self.lanes.read(lambda tensors: None, key=1)
            else:
                await self.lanes.get(key=1)
        await self.trip_once(b"")
        return count * LARGE / 2**20 / (time.perf_counter() - start)

    async def trips(self, count: int) -> float:
        """Milliseconds of one."""
        message, start = torch.zeros(SMALL, dtype=torch.uint8), time.perf_counter()
        for _ in range(count):
            await self.trip_once(message)
        return (time.perf_counter() - start) / count * 1e3

    async def trip_once(self, message: Any) -> None:
        if self.rank == 0:
            await self.lanes.put(message, key=1)
            await self.lanes.get(key=0)
        else:
            await self.lanes.put(await self.lanes.get(key=1), key=0)

    def plain_throughput(self, count: int) -> float:
        memory, start = memoryview(bytearray(LARGE)), time.perf_counter()
        for _ in range(count):
            if self.rank == 0:
                self.plain.sendall(memory)
            else:
                wire.receive_into(self.plain, memory)
        self.plain_trip(memory[:1])
        return count * LARGE / 2**20 / (time.perf_counter() - start)

    def plain_trips(self, count: int, codec: bool) -> float:
        item = torch.zeros(SMALL, dtype=torch.uint8)
        memory = np.empty(encode(item).nbytes if codec else SMALL, np.uint8)
        start = time.perf_counter()
        for _ in range(count):
            if codec and self.rank == 0:
                encode(item).write(memory)
            self.plain_trip(memory.data, codec)
            if codec and self.rank == 0:
                decode(memory)
        return (time.perf_counter() - start) / count * 1e3

    def plain_trip(self, memory: memoryview, codec: bool = False) -> None:
        if self.rank == 0:
            self.plain.sendall(memory)
        wire.receive_into(self.plain, memory)
        if self.rank == 1:
            if codec:
                array = np.frombuffer(memory, np.uint8)
                encode(decode(array)).write(array)
            self.plain.sendall(memory)


COLUMNS = ("get MiB/s", "read MiB/s", "plain TCP MiB/s", "round trip ms", "plain TCP ms", "plain TCP, codec ms")


def measure(count: int, trips: int) -> list[float]:
    """One row of :data:`COLUMNS`."""
    backend = ProcessBackend(60.0, host=ClusterHost(LocalNodes(2), (0, 1)))
    try:
        lanes = backend.channel("lanes", range(2), CAPACITY, range(2))
        arguments = {"lanes": lanes}
        spec = GroupSpec(name="ends", worker=End, arguments=arguments, devices=["cpu"] * 2, num_threads=1, slots=(0, 1))
        (ends,) = backend.launch([spec])
        ends.call(End.connect, ends.call(End.listen).wait()[1]).wait()
        calls = [
            (End.throughput, count, False),
            (End.throughput, count, True),
            (End.plain_throughput, count),
            (End.trips, trips),
            (End.plain_trips, trips, False),
            (End.plain_trips, trips, True),
        ]
        for method, _, *rest in calls:  # once for the connections and the memory
            ends.call(method, 3, *rest).wait()
        return [ends.call(*call).wait()[0] for call in calls]
    finally:
        backend.shutdown()


def by_ray(count: int, trips: int) -> dict[str, tuple[float, float]]:
    """Where the receiver is -> MiB/s, milliseconds of a round trip."""
    import logging

    import ray
    from ray.cluster_utils import Cluster

    class Receiver:
        def take(self, message: Any) -> Any:
            return message if isinstance(message, np.ndarray) else None

    nodes = {"within a raylet": {"here": 1}, "between two": {"there": 1}}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": nodes["within a raylet"]})
    found: dict[str, tuple[float, float]] = {}
    try:
        cluster.add_node(num_cpus=2, resources=nodes["between two"])
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        message = {f"tensor {i}": np.zeros(LARGE // 8, np.uint8) for i in range(8)}
        for where, resources in nodes.items():
            receiver: Any = ray.remote(Receiver).options(resources=resources).remote()
            ray.get([receiver.take.remote(message) for _ in range(3)])
            start = time.perf_counter()
            ray.get([receiver.take.remote(message) for _ in range(count)])
            rate, small = count * LARGE / 2**20 / (time.perf_counter() - start), np.zeros(SMALL, np.uint8)
            start = time.perf_counter()
            for _ in range(trips):
                ray.get(receiver.take.remote(small))
            found[where] = rate, (time.perf_counter() - start) / trips * 1e3
            ray.kill(receiver)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--trips", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="Ray's object store, too")
    asked = parser.parse_args()
    print("|", " | ".join(COLUMNS), "|\n|" + "---|" * len(COLUMNS))
    for _ in range(asked.repeats):
        row = measure(asked.messages, asked.trips)
        print("|", " | ".join(f"{value:.0f}" if value > 10 else f"{value:.3f}" for value in row), "|", flush=True)
    if asked.ray:
        print("\n| Ray's object store | MiB/s | round trip ms |\n|---|---|---|")
        for where, (rate, trip) in by_ray(asked.messages, asked.trips).items():
            print(f"| {where} | {rate:.0f} | {trip:.3f} |")


if __name__ == "__main__":
    from benchmarks import network  # workers import its class by this name

    network.main()
