"""How fast a version of the weights gets to the rollout workers of a node, as a share of a plain copy.

    python -m benchmarks.weight_sync [--quick] [--receivers N] [--planes channel,in_process,collective] [--json FILE]

A gigabyte of float32 in linear layers, sharded over one rank. A version's time is from the call in the actor to the
moment when each receiver holds all of it. Each round measures plain copies of the same tensors before and after, so
that both meet the same load of the machine; all memory is touched before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard

from embodied_rl.channel.base import run_blocking
from embodied_rl.channel.in_process import InProcessChannel, Scheduler
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.cli import config_of
from embodied_rl.models.base import Policy
from embodied_rl.tasks.wiring import BUCKETS_IN_FLIGHT
from embodied_rl.training.sharding import init_process_group
from embodied_rl.workers.weight_broadcast import BroadcastReceiver, BroadcastSender
from embodied_rl.workers.weight_planes import InProcessSender
from embodied_rl.workers.weight_sync import SendsWeights, WeightReceiver, WeightSender

WIDTH = 1024
SPAWN = mp.get_context("spawn")
PLANES = ("channel", "in_process", "collective")
"""Shared memory between processes; within one, as with ``cluster=serial``; gloo's broadcast."""


def network(mebibytes: int) -> nn.Sequential:
    """Blocks of 48 MiB."""
    blocks = -(-mebibytes // 48)
    sizes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(blocks)))


def serve(plane: str, channel: SharedMemoryChannel, key: int, pipe: Connection, mebibytes: int) -> None:
    """A rollout worker: says when it holds a version."""
    torch.set_num_threads(1)
    end = BroadcastReceiver(channel, device="cpu", rank=key) if plane == "collective" else channel
    receiver = WeightReceiver(network(mebibytes).state_dict(), end, key)
    pipe.send(None)
    while pipe.recv():
        run_blocking(receiver.receive())
        pipe.send(time.perf_counter())  # the clock is the machine's


class Processes:
    """Receivers in processes of their own."""

    def __init__(self, plane: str, receivers: int, mebibytes: int) -> None:
        channel = SharedMemoryChannel("weights", range(receivers), BUCKETS_IN_FLIGHT, SPAWN)
        self.end: SendsWeights = channel
        if plane == "collective":
            self.end = BroadcastSender(channel, device="cpu", host="127.0.0.1", receivers=receivers)
        self._pipes, self._workers = [], []
        for key in range(receivers):
            ours, theirs = SPAWN.Pipe()
            arguments = (plane, channel, key, theirs, mebibytes)
            self._workers.append(SPAWN.Process(target=serve, args=arguments, daemon=True))
            self._workers[-1].start()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def synced(self, sending: Coroutine[Any, Any, int]) -> float:
        """Seconds that a version takes."""
        for pipe in self._pipes:
            pipe.send(True)
        start = time.perf_counter()
        run_blocking(sending)
        return max(pipe.recv() for pipe in self._pipes) - start

    def end_all(self) -> None:
        for worker in self._workers:
            worker.kill()


class InProcess:
    """Receivers in the actor's process, as with ``cluster=serial``."""

    def __init__(self, receivers: int, mebibytes: int) -> None:
        channel = InProcessChannel("weights", BUCKETS_IN_FLIGHT)
        self.end = InProcessSender(channel)
        self._receivers = [WeightReceiver(network(mebibytes).state_dict(), channel, key) for key in range(receivers)]

    def synced(self, sending: Coroutine[Any, Any, int]) -> float:
        """Seconds that a version takes."""
        scheduler, start = Scheduler(), time.perf_counter()
        sent = scheduler.add("actor", sending)
        for task in [scheduler.add("rollout", receiver.receive()) for receiver in self._receivers]:
            scheduler.run_until(task)
        scheduler.run_until(sent)
        return time.perf_counter() - start

    def end_all(self) -> None:
        self._receivers.clear()


def measure(plane: str, mebibytes: int, bucket_mb: int, rounds: int, receivers: int = 1) -> dict[str, Any]:
    """GiB/s of the sync and of a plain copy, by round."""
    torch.set_num_threads(1)
    policy = network(mebibytes)
    mesh = init_process_group(device="cpu", rank=0, world_size=1, rendezvous="")
    for block in policy:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    source = [tensor.clone() for tensor in network(mebibytes).state_dict().values()]
    target = [tensor.clone() for tensor in source]
    gibibytes = sum(tensor.nbytes for tensor in source) / 2**30
    workers = InProcess(receivers, mebibytes) if plane == "in_process" else Processes(plane, receivers, mebibytes)
    sender = WeightSender(cast(Policy, policy), workers.end, range(receivers), bucket_bytes=bucket_mb * 2**20)

    def copied() -> float:
        start = time.perf_counter()
        for into, tensor in zip(target, source, strict=True):
            into.copy_(tensor)
        return gibibytes / (time.perf_counter() - start)

    try:
        workers.synced(sender.send(0))  # maps the slots
        found: dict[str, Any] = {"plane": plane, "gibibytes": gibibytes, "bucket_mb": bucket_mb, "receivers": receivers}
        found |= {"sync": [], "copy": [], "of_copy": []}
        for version in range(1, rounds + 1):
            before = copied()
            rate = gibibytes / workers.synced(sender.send(version))
            copy = (before + copied()) / 2
            found["sync"].append(rate)
            found["copy"].append(copy)
            found["of_copy"].append(rate / copy)
    finally:
        workers.end_all()
        dist.destroy_process_group()
    return found


def compared(found: list[dict[str, Any]]) -> dict[str, float]:
    return {f"{row['plane']}, bytes/s by a plain copy's": statistics.median(row["of_copy"]) for row in found}


def show(found: list[dict[str, Any]]) -> Table:
    first = found[0]
    table = Table(title=f"{first['gibibytes']:.2f} GiB in buckets of {first['bucket_mb']} MiB, medians (best rounds)")
    for column in ("plane", "receivers", "plain copy, GiB/s", "each, GiB/s", "the node, GiB/s", "of a plain copy"):
        table.add_column(column, justify="left" if column == "plane" else "right")
    for row in found:
        count = row["receivers"]

        def of(name: str, times: int = 1, row: dict[str, Any] = row) -> str:
            return f"{times * statistics.median(row[name]):.2f} ({times * max(row[name]):.2f})"

        table.add_row(row["plane"], str(count), of("copy"), of("sync"), of("sync", count), of("of_copy", count))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the weights, fewer rounds")
    parser.add_argument("--bucket-mb", type=int, help="instead of the default of actor.sync_bucket_mb")
    parser.add_argument("--receivers", type=int, default=1, help="rollout workers on the node")
    parser.add_argument("--planes", default=",".join(PLANES), help=f"of {','.join(PLANES)} (the default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    bucket_mb = options.bucket_mb or config_of("env=dummy").actor.sync_bucket_mb
    size, rounds = (256, 3) if options.quick else (1024, 9)
    planes = options.planes.split(",")
    if unknown := set(planes) - set(PLANES):
        parser.error(f"--planes: got {', '.join(sorted(unknown))}, expected some of {', '.join(PLANES)}")
    found = [measure(plane, size, bucket_mb, rounds, options.receivers) for plane in planes]
    Console().print(show(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
