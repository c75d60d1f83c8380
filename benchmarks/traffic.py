"""What a training step sends between workers: ``python -m benchmarks.traffic [--quick] [--json FILE]``.

``bytes`` counts every message of one LIBERO training step by channel, as the codec writes it, in the serial backend:
four envs of one task, ``model=tiny_vla``, two cameras of 128 x 128 pixels, 32 steps in chunks of 8, PPO. Weights are
left out: they are the same however trajectories travel.

``toy`` is the rate of the toy env in the process backend, where messages are all there is: 64 envs in two stages, an
``mlp`` policy, 16 chunks of 4 steps a rollout. By the wall clock, until the actor has all trajectories; the median of
the rounds.

``one action`` is that rate where a message has one action of each env, in the serial backend with one stage: all 64
envs in a message, on one core. ``turn`` is the CPU time of one message of 32 envs and its answer there, in two stages:
simulator, policy and all that is between them, trajectories included. The least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from embodied_rl.channel.base import Channel
from embodied_rl.channel.codec import encode
from embodied_rl.channel.in_process import InProcessChannel
from embodied_rl.cli import config_of
from embodied_rl.launch import connect, make_backend
from embodied_rl.runtime.serial import SerialBackend
from embodied_rl.runtime.worker import WorkerGroup
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvReport, EnvWorker
from embodied_rl.workers.rollout import RolloutWorker

LIBERO = (
    "env=libero_spatial",
    "model=tiny_vla",
    "algorithm=ppo",
    "env.task_ids=[0]",
    "cluster=serial",
    "cluster.component_placement.env=0",
    "env.train.total_num_envs=4",
    "algorithm.group_size=2",
    "model.num_action_chunks=8",
    "env.train.max_episode_steps=32",
)
TOY = (
    "env=dummy",
    "model=mlp",
    "algorithm=ppo",
    "env.train.total_num_envs=64",
    "rollout.pipeline_stage_num=2",
    "algorithm.group_size=4",
    "model.num_action_chunks=4",
    "env.train.max_episode_steps=64",
    "cluster.component_placement.env=0",
)
ONE_ACTION = (*TOY, "cluster=serial", "env.train.max_episode_steps=256", "model.num_action_chunks=1")


class CountingChannel(InProcessChannel):
    """Adds up the bytes and messages that go in."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        self.bytes = self.messages = 0

    async def put(self, item: Any, *, key: Hashable = 0, timeout: float | None = None) -> None:
        self.bytes += encode(item).nbytes
        self.messages += 1
        await super().put(item, key=key, timeout=timeout)


class CountingBackend(SerialBackend):
    """Makes channels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[CountingChannel] = []

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int] = ()) -> Channel:
        del keys, readers
        self.counted.append(CountingChannel(name, capacity))
        self._channels.append(self.counted[-1])
        return self.counted[-1]


def training_rollout(groups: Sequence[WorkerGroup], step: int) -> EnvReport:
    """One rollout and its way to the actor."""
    env, rollout, actor = groups
    served = rollout.call(RolloutWorker.serve, mode="train", step=step)
    received = actor.call(ActorWorker.receive, step=step)
    [report] = env.call(EnvWorker.interact, step=step).wait()
    served.wait()
    received.wait()
    return report


def load_weights(groups: Sequence[WorkerGroup]) -> None:
    _, rollout, actor = groups
    loaded = rollout.call(RolloutWorker.load_weights, 0)
    actor.call(ActorWorker.publish_weights, 0).wait()
    loaded.wait()


def bytes_by_channel() -> dict[str, dict[str, int]]:
    config = config_of(*LIBERO)
    backend = CountingBackend()
    try:
        groups = connect(config, backend)
        load_weights(groups)
        before = Counter({channel.name: channel.bytes for channel in backend.counted})
        messages = Counter({channel.name: channel.messages for channel in backend.counted})
        training_rollout(groups, 0)
        return {
            channel.name: {
                "bytes": channel.bytes - before[channel.name],
                "messages": channel.messages - messages[channel.name],
            }
            for channel in backend.counted
            if channel.name != "weights"
        }
    finally:
        backend.shutdown()


def toy_rates(rounds: int) -> list[float]:
    """Env steps per second, by round."""
    return [report.env_steps / seconds for report, seconds in _rollouts(TOY, rounds, time.perf_counter)]


def one_action_rates(rounds: int) -> list[float]:
    """Env steps per second, by round."""
    found = _rollouts([*ONE_ACTION, "rollout.pipeline_stage_num=1"], rounds, time.perf_counter)
    return [report.env_steps / seconds for report, seconds in found]


def toy_turn(rounds: int) -> float:
    """CPU microseconds."""
    found = _rollouts(ONE_ACTION, rounds, time.process_time)
    return 1e6 * min(seconds for _, seconds in found) / (2 * 256)  # stages, chunks


def _rollouts(options: Sequence[str], rounds: int, clock: Callable[[], float]) -> list[tuple[EnvReport, float]]:
    """Each round's report and seconds by the clock."""
    config = config_of(*options)
    backend = make_backend(config)
    found = []
    try:
        groups = connect(config, backend)
        load_weights(groups)
        for step in range(rounds + 2):
            start = clock()
            found.append((training_rollout(groups, step), clock() - start))
    finally:
        backend.shutdown()
    return found[2:]  # the first rounds warm up


def run(rounds: int) -> dict[str, Any]:
    return {
        "channels": bytes_by_channel(),
        "toy_steps_per_s": toy_rates(rounds),
        "one_action_steps_per_s": one_action_rates(max(rounds // 3, 3)),
        "toy_turn_cpu_us": toy_turn(max(rounds // 3, 3)),
    }


def report(result: dict[str, Any], console: Console) -> None:
    table = Table(title="One LIBERO training step: 4 envs x 4 chunks of 8, two cameras of 128")
    for column in ("channel", "messages", "KiB"):
        table.add_column(column, justify="left" if column == "channel" else "right")
    for name, counted in result["channels"].items():
        table.add_row(name, str(counted["messages"]), f"{counted['bytes'] / 1024:.0f}")
    total = sum(counted["bytes"] for counted in result["channels"].values())
    table.add_row("all", "", f"{total / 1024:.0f}", end_section=True)
    console.print(table)
    console.print(f"toy env: {median(result['toy_steps_per_s']):.0f} env steps/s")
    one_action = f"{median(result['one_action_steps_per_s']):.0f} env steps/s in one process"
    turn = f"{result['toy_turn_cpu_us']:.0f} CPU-µs a turn of 32 envs"
    console.print(f"toy env, one action a message: {one_action}; {turn}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic", description="What a training step sends between workers."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    options = parser.parse_args()
    result = run(rounds=10 if options.quick else 60)
    report(result, Console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
