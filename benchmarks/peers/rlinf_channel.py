"""Times RLinf's channel between two of its workers (runs in the peers' environment).

Each line on standard input is ``throughput<TAB>messages`` or ``latency<TAB>messages``. Each answer on standard output,
where Ray and RLinf print too, is a line ``answer<TAB>number``: bytes a second of large messages, or the median seconds
of a small one's way there and back.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker  # pyright: ignore[reportMissingImports]

from benchmarks.peers.messages import IN_FLIGHT, LARGE_BYTES, large_message, small_message


class Peer(Worker):
    """One side. It puts without waiting, as RLinf's env and rollout workers do, ``IN_FLIGHT`` at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    def throughput(self, requests: Channel, answers: Channel, count: int) -> float:
        large, under_way = large_message(), []
        started = time.perf_counter()
        for _ in range(count):
            under_way.append(requests.put(large, async_op=True))
            if len(under_way) > IN_FLIGHT:
                under_way.pop(0).wait()
        answers.get()
        return count * LARGE_BYTES / (time.perf_counter() - started)

    def take(self, requests: Channel, answers: Channel, count: int) -> None:
        for _ in range(count):
            requests.get()
        answers.put(small_message())

    def latency(self, requests: Channel, answers: Channel, count: int) -> float:
        small, times = small_message(), []
        for _ in range(count):
            started = time.perf_counter()
            requests.put(small, async_op=True)
            answers.get()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def echo(self, requests: Channel, answers: Channel, count: int) -> None:
        for _ in range(count):
            answers.put(requests.get(), async_op=True)


def main() -> None:
    cluster, here = Cluster(num_nodes=1), NodePlacementStrategy([0])
    sender, receiver = (
        Peer.create_group().launch(cluster, name=name, placement_strategy=here) for name in ("sender", "receiver")
    )
    channels = [Channel.create(name, maxsize=IN_FLIGHT) for name in ("requests", "answers")]
    for line in sys.stdin:
        order, _, count = line.rstrip("\n").partition("\t")
        received = (receiver.take if order == "throughput" else receiver.echo)(*channels, int(count))
        [number] = (sender.throughput if order == "throughput" else sender.latency)(*channels, int(count)).wait()
        received.wait()
        print(f"answer\t{number}", flush=True)


if __name__ == "__main__":
    main()
