"""A LIBERO env worker against a bare loop: ``python -m benchmarks.env_worker [--quick] [--json FILE]``.

``bare`` steps one LiberoEnv in this process, with random actions, rendering both cameras where a chunk of 8 ends: no
chunk machinery, no messages, no policy. ``worker`` is the one env worker of a run in the process backend: the same
number of envs in two pipeline stages, masks, rewards and records, observations to a rollout worker and actions back,
and trajectories recorded and sent to the actor. Scene building and resets are left out on both sides. They alternate,
so they meet the same load of the machine; the table shows the median of the rounds.

The policy is an ``mlp``, so what is measured is the worker; the row with ``tiny_vla`` shows what pipelining hides of
the inference when both share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from embodied_rl.cli import config_of
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.launch import connect, make_backend
from embodied_rl.runtime.worker import Backend
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvReport, EnvWorker
from embodied_rl.workers.rollout import RolloutWorker

SUITE, ENVS, CHUNK = "libero_10", 4, 8


class Bare:
    """One LiberoEnv, ``ENVS`` slots, one after the other for a chunk each."""

    def __init__(self) -> None:
        self.env = LiberoEnv(ENVS, LiberoParams(task_suite_name=SUITE), seed=0)
        self.rng = np.random.default_rng(0)

    def steps_per_second(self, chunks: int) -> float:
        self.env.reset(range(ENVS), [0] * ENVS)
        start = time.perf_counter()
        for _ in range(chunks):
            actions = self.rng.normal(0.0, 0.6, (ENVS, CHUNK, 7)).clip(-1, 1).astype(np.float32)
            for slot in range(ENVS):
                for action in actions[slot]:
                    self.env.step([slot], action[None])
                self.env.observe([slot])
        return ENVS * chunks * CHUNK / (time.perf_counter() - start)


class Worker:
    """One env worker in a run of the process backend."""

    def __init__(self, model: str, chunks: int) -> None:
        config = config_of(
            f"env={SUITE}",
            f"model={model}",
            "env.task_ids=[0]",
            "cluster.component_placement.env=0",
            "cluster.num_threads.actor=1",
            f"model.num_action_chunks={CHUNK}",
            f"env.train.total_num_envs={ENVS}",
            "algorithm.group_size=2",
            f"env.train.max_episode_steps={chunks * CHUNK}",
        )
        self.backend: Backend = make_backend(config)
        self.env, self.rollout, self.actor = connect(config, self.backend)
        loaded = self.rollout.call(RolloutWorker.load_weights, 0)
        self.actor.call(ActorWorker.publish_weights, 0).wait()
        loaded.wait()
        self.step = 0

    def steps_per_second(self) -> float:
        self.step += 1
        served = self.rollout.call(RolloutWorker.serve, mode="train", step=self.step)
        received = self.actor.call(ActorWorker.receive, step=self.step)
        reports: list[EnvReport] = self.env.call(EnvWorker.interact, step=self.step).wait()
        served.wait()
        received.wait()
        [report] = reports
        return report.env_steps / (report.seconds["env"] + report.seconds["wait"])


def run(rounds: int, chunks: int) -> dict[str, Any]:
    """Steps per second of each, by round, and the medians of the ratios to ``bare`` in the same round."""
    bare = Bare()
    bare.steps_per_second(1)  # builds the scene
    workers = {model: Worker(model, chunks) for model in ("mlp", "tiny_vla")}
    rates: dict[str, list[float]] = {"bare": [], **{f"worker, {model}": [] for model in workers}}
    try:
        for worker in workers.values():
            worker.steps_per_second()
        for _ in range(rounds):
            rates["bare"].append(bare.steps_per_second(chunks))
            for model, worker in workers.items():
                rates[f"worker, {model}"].append(worker.steps_per_second())
    finally:
        for worker in workers.values():
            worker.backend.shutdown()
        bare.env.close()
    ratios = {
        name: median(rate / base for rate, base in zip(values, rates["bare"], strict=True))
        for name, values in rates.items()
    }
    return {"steps_per_s": rates, "ratio_to_bare": ratios}


def compared(result: dict[str, Any]) -> dict[str, float]:
    return {f"{name}, by a bare loop": ratio for name, ratio in result["ratio_to_bare"].items() if name != "bare"}


def report(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"LIBERO env worker: {SUITE} task 0, {ENVS} envs, chunks of {CHUNK}, two cameras of 128")
    for column in ("", "steps/s", "of the bare loop"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in result["steps_per_s"].items():
        table.add_row(name, f"{median(values):.1f}", f"{result['ratio_to_bare'][name]:.2f}")
    console.print(table)
    console.print("Goal: worker, mlp at least 0.95 of the bare loop.")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.env_worker", description="A LIBERO env worker against a bare loop."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    options = parser.parse_args()
    result = run(rounds=3 if options.quick else 7, chunks=4 if options.quick else 12)
    report(result, Console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
