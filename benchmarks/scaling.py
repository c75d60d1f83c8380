"""What more nodes and workers cost: ``python -m benchmarks.scaling``, tables as Markdown (docs/scaling.md).

Nodes: agents on this machine, each with env workers whose simulator sleeps, so that cores are no limit; one more with
the rollout worker and the actor. Driver: the processor time that it takes while workers work and report, and that of a
call to all of them. Bytes: those of a LIBERO training step, by channel (``benchmarks.traffic``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

from embodied_rl import launch
from embodied_rl.cli import config_of
from embodied_rl.runtime.cluster import ClusterHost
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.serial import SerialBackend
from embodied_rl.runtime.worker import Backend, GroupSpec, Worker, WorkerGroup
from embodied_rl.tasks.planning import plan_of
from tests.runtime.agents import LocalNodes

ENV_STEP_S = 0.05
"""Of all slots of a stage at once."""
ENVS = 8
"""Of an env worker, in two stages."""
REPORT_S = 0.1


class Idle(Worker):
    """Reports progress, as env workers do, and does nothing else."""

    def work(self, seconds: float) -> None:
        for number in range(count := round(seconds / REPORT_S)):
            self.context.report_progress("idling", number, count)
            time.sleep(REPORT_S)

    def nothing(self) -> None:
        pass


def env_steps_per_s(nodes: int, workers: int, steps: int) -> float:
    """Median over the training steps but the first.

    Args:
        workers: env workers on each node.
    """
    env = nodes * workers
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(
            "experiment=dummy_grpo",
            "env.env_type=benchmarks.pipelining:SleepingEnv",
            f"env.init_params.step_s={ENV_STEP_S}",
            f"env.train.total_num_envs={env * ENVS}",
            f"runner.max_steps={steps}",
            "runner.val_check_interval=-1",
            "runner.eval_at_end=false",
            "runner.save_interval=-1",
            "runner.report=false",
            f"runner.output_dir={folder}",
            "runner.logger.logger_backends=[jsonl]",
            "cluster=ray",
            f"+cluster.node_groups={{sim: {{nodes: {nodes}, slots: {workers}}}, learn: {{slots: 2}}}}",
            f"cluster.component_placement.env=sim:0-{env - 1}",
            "cluster.component_placement.rollout=learn:0",
            "cluster.component_placement.actor=learn:1",
        )
        host = ClusterHost(LocalNodes(nodes + 1), launch.placement_of(config).node_of())
        with mock.patch.object(launch, "_cluster", return_value=host):
            launch.carry_out(plan_of(config), quiet=True)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = [row["rollout/env_steps_per_s"] for row in rows if "rollout/env_steps_per_s" in row]
    return median(rates[1:])


def driver(backend: Backend, count: int, seconds: float) -> tuple[float, float]:
    """(share of a core while ``count`` workers work, milliseconds of processor time of a call to all)."""
    try:
        (group,) = backend.launch(
            [GroupSpec(name="idle", worker=Idle, arguments={}, devices=["cpu"] * count, num_threads=1)]
        )
        call(group, Idle.nothing)
        share = 0.0
        if isinstance(backend, ProcessBackend):
            start, busy = time.perf_counter(), time.process_time()
            call(group, Idle.work, seconds)
            share = (time.process_time() - busy) / (time.perf_counter() - start)
        repeats, busy = 20, time.process_time()
        for _ in range(repeats):
            call(group, Idle.nothing)
        return share, (time.process_time() - busy) / repeats * 1e3
    finally:
        backend.shutdown()


def call(group: WorkerGroup, method: object, *arguments: float) -> None:
    group.call(method, *arguments).wait()  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=2, help="env workers on a node")
    parser.add_argument("--steps", type=int, default=5, help="training steps of a number of nodes")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--serial", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--seconds", type=float, default=20.0, help="that processes work")
    parser.add_argument("--no-bytes", action="store_true")
    asked = parser.parse_args()
    print("| nodes | env workers | env steps/s | efficiency |\n|---|---|---|---|")
    first: float | None = None
    for nodes in asked.nodes:
        rate = env_steps_per_s(nodes, asked.workers, asked.steps)
        first = first or rate / nodes
        print(f"| {nodes} | {nodes * asked.workers} | {rate:.0f} | {rate / nodes / first:.2f} |", flush=True)
    print("\n| workers | kind | driver, share of a core | a call to all, ms of processor time |\n|---|---|---|---|")
    for count in asked.processes:
        share, cost = driver(ProcessBackend(120.0), count, asked.seconds)
        print(f"| {count} | processes | {share:.1%} | {cost:.2f} |", flush=True)
    for count in asked.serial:
        _, cost = driver(SerialBackend(), count, asked.seconds)
        print(f"| {count} | serial | | {cost:.2f} |", flush=True)
    if not asked.no_bytes:
        from benchmarks.traffic import bytes_by_channel

        print("\n| channel | messages a training step | KiB |\n|---|---|---|")
        for name, sent in bytes_by_channel().items():
            print(f"| {name} | {sent['messages']} | {sent['bytes'] / 1024:.0f} |")


if __name__ == "__main__":
    from benchmarks import scaling  # workers import its classes by this name

    scaling.main()
