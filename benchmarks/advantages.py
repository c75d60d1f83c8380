"""What advantages and the policy loss cost on one CPU thread, beside RLinf's functions on the same inputs.

    python -m benchmarks.advantages [--quick] [--json FILE]

A rollout of 512 envs and 64 chunks of C steps. Ours and RLinf's take turns in every round, so that both meet the same
load of the machine; the table shows the median of the rounds. CPU time is steadier than wall time on a shared machine.
RLinf's column needs the peers' environment (``benchmarks/peers/setup.sh``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.peers import environment
from benchmarks.peers.workload import ENVS, FUNCTIONS, GROUP, ROLLOUT, WORKLOADS, Workload, draw, measure
from embodied_rl.algorithms.advantages import AdvantageInputs, gae, grpo
from embodied_rl.algorithms.losses import ppo_policy_loss
from embodied_rl.algorithms.statistics import rollout_returns
from embodied_rl.algorithms.units import aggregate
from embodied_rl.schema.types import RewardLevel

GOALS = {("gae", "C=1"): 2.5, ("grpo", "C=1"): 0.8}
"""CPU-ms."""


def inputs(w: Workload, scores: Tensor) -> AdvantageInputs:
    return AdvantageInputs(
        reward_level=cast(RewardLevel, w.level),
        rewards=w.rewards,
        terminated=w.ended,
        truncated=torch.zeros_like(w.ended),
        valid=w.valid,
        group_ids=torch.arange(ENVS) // GROUP,
        scores=scores,
        values=w.values[:-1],
        bootstrap_values=w.values[1:, :, 0],
    )


def ppo(w: Workload) -> None:
    leaf = w.logprobs.detach().requires_grad_()
    units, _ = ppo_policy_loss(
        logprobs=leaf,
        old_logprobs=w.old_logprobs,
        advantages=w.advantages,
        mask=w.mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    count = float(w.mask.sum())
    aggregate(units, w.mask, weights=torch.ones(len(w.mask)), denominator=count).backward()


# What GRPO compares belongs to its cost, as with RLinf.
OURS: dict[str, Callable[[Workload], object]] = {
    "gae": lambda w: gae(inputs(w, torch.zeros(ENVS)), gamma=0.99, gae_lambda=0.95),
    "grpo": lambda w: grpo(inputs(w, rollout_returns(w.rewards, w.valid))),
    "ppo loss, forward and backward": ppo,
}


class RLinf:
    """``peers/rlinf_timing.py`` in its own environment, alive for all rounds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [environment.PYTHON, "-W", "ignore", "-m", "benchmarks.peers.rlinf_timing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, function: str, workload: str, repetitions: int) -> tuple[float, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{function}\t{workload}\t{repetitions}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("RLinf's process ended; its message is above")
        cpu, wall = answer.split("\t")
        return float(cpu), float(wall)

    def finish(self) -> None:
        self.process.communicate(timeout=30)


def run(rounds: int, repetitions: int) -> list[dict[str, Any]]:
    """One row for each function and workload, with every round's CPU-ms and wall-ms."""
    workloads = {name: draw(name) for name in WORKLOADS}
    rows: list[dict[str, Any]] = [
        {"function": f, "workload": w, "ours": [], "rlinf": []} for f in FUNCTIONS for w in workloads
    ]
    rlinf = RLinf() if environment.exists() else None
    try:
        for warm_up in (True, *[False] * rounds):
            for row in rows:
                function, name = row["function"], row["workload"]
                times = 3 if warm_up else repetitions
                own = measure(partial(OURS[function], workloads[name]), times)
                theirs = rlinf.measure(function, name, times) if rlinf else None
                if not warm_up:
                    row["ours"].append(own)
                    if theirs:
                        row["rlinf"].append(theirs)
    finally:
        if rlinf:
            rlinf.finish()
    return rows


def compared(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{row['function']}, {row['workload']}: RLinf's CPU time by ours": median(
            theirs[0] / own[0] for theirs, own in zip(row["rlinf"], row["ours"], strict=True)
        )
        for row in rows
        if row["rlinf"]
    }


def report(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{ENVS} envs, {ROLLOUT} chunks of C steps, one thread: median ms")
    table.add_column("function")
    table.add_column("rollout")
    for column in ("CPU", "wall", "goal, CPU", "RLinf, CPU", "RLinf, wall", "RLinf ÷ ours, CPU"):
        table.add_column(column, justify="right")
    missed = []
    for row in rows:
        cpu, wall = (median(x) for x in zip(*row["ours"], strict=True))
        goal = GOALS.get((row["function"], row["workload"]))
        if goal is not None and cpu > goal:
            missed.append(f"{row['function']} {row['workload']}")
        theirs = ["", "", ""]
        if row["rlinf"]:
            their_cpu, their_wall = (median(x) for x in zip(*row["rlinf"], strict=True))
            ratio = median(t[0] / o[0] for t, o in zip(row["rlinf"], row["ours"], strict=True))
            theirs = [f"{their_cpu:.2f}", f"{their_wall:.2f}", f"{ratio:.1f}"]
        table.add_row(
            row["function"], row["workload"], f"{cpu:.2f}", f"{wall:.2f}", "" if goal is None else f"{goal}", *theirs
        )
    console.print(table)
    console.print(f"goals missed: {', '.join(missed)}" if missed else "both goals are met")
    if not environment.exists():
        console.print(f"RLinf's functions are not timed: {environment.HOW_TO_MAKE}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advantages", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(rounds=3 if options.quick else 15, repetitions=10 if options.quick else 30)
    report(rows, Console())
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
