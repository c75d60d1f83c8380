"""How fast a version of the weights gets to rollout workers in other processes, as a share of a plain copy.

    python -m benchmarks.weight_sync [--quick] [--receivers N] [--json FILE]

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
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.cli import config_of
from embodied_rl.models.base import Policy
from embodied_rl.tasks.wiring import BUCKETS_IN_FLIGHT
from embodied_rl.training.sharding import init_process_group
from embodied_rl.workers.weight_sync import WeightReceiver, WeightSender

WIDTH = 1024
SPAWN = mp.get_context("spawn")


def network(mebibytes: int) -> nn.Sequential:
    """Blocks of 48 MiB."""
    blocks = -(-mebibytes // 48)
    sizes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(blocks)))


def serve(channel: SharedMemoryChannel, key: int, pipe: Connection, mebibytes: int) -> None:
    """A rollout worker: says when it holds a version."""
    torch.set_num_threads(1)
    receiver = WeightReceiver(network(mebibytes).state_dict(), channel, key)
    pipe.send(None)
    while pipe.recv():
        run_blocking(receiver.receive())
        pipe.send(time.perf_counter())  # the clock is the machine's


def measure(mebibytes: int, bucket_mb: int, rounds: int, receivers: int = 1) -> dict[str, Any]:
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
    channel = SharedMemoryChannel("weights", range(receivers), BUCKETS_IN_FLIGHT, SPAWN)
    pipes, workers = [], []
    for key in range(receivers):
        ours, theirs = SPAWN.Pipe()
        workers.append(SPAWN.Process(target=serve, args=(channel, key, theirs, mebibytes), daemon=True))
        workers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    sender = WeightSender(cast(Policy, policy), channel, range(receivers), bucket_bytes=bucket_mb * 2**20)

    def copied() -> float:
        start = time.perf_counter()
        for into, tensor in zip(target, source, strict=True):
            into.copy_(tensor)
        return gibibytes / (time.perf_counter() - start)

    def synced(version: int) -> float:
        for pipe in pipes:
            pipe.send(True)
        start = time.perf_counter()
        run_blocking(sender.send(version))
        return gibibytes / (max(pipe.recv() for pipe in pipes) - start)

    try:
        synced(0)  # maps the slots
        found: dict[str, Any] = {"gibibytes": gibibytes, "bucket_mb": bucket_mb, "receivers": receivers}
        found |= {"sync": [], "copy": [], "of_copy": []}
        for version in range(1, rounds + 1):
            before = copied()
            rate = synced(version)
            copy = (before + copied()) / 2
            found["sync"].append(rate)
            found["copy"].append(copy)
            found["of_copy"].append(rate / copy)
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send(False)
            worker.join(30)
    finally:
        for worker in workers:
            worker.kill()
        dist.destroy_process_group()
    return found


def show(found: dict[str, Any]) -> Table:
    to = "another process" if found["receivers"] == 1 else f"{found['receivers']} processes each"
    table = Table(title=f"{found['gibibytes']:.2f} GiB to {to}, buckets of {found['bucket_mb']} MiB")
    for column in ("", "median", "best round"):
        table.add_column(column, justify="right" if column else "left")
    for name, title in (("copy", "plain copy, GiB/s"), ("sync", "weight sync, GiB/s")):
        table.add_row(title, f"{statistics.median(found[name]):.2f}", f"{max(found[name]):.2f}")
    shares = found["of_copy"]
    table.add_row("of a plain copy", f"{statistics.median(shares):.0%}", f"{max(shares):.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the weights, fewer rounds")
    parser.add_argument("--bucket-mb", type=int, help="instead of the default of actor.sync_bucket_mb")
    parser.add_argument("--receivers", type=int, default=1, help="rollout workers on the node")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    bucket_mb = options.bucket_mb or config_of("env=dummy").actor.sync_bucket_mb
    found = measure(256 if options.quick else 1024, bucket_mb, 3 if options.quick else 9, options.receivers)
    Console().print(show(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
