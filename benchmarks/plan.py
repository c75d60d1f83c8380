"""The plan's forecast against runs: ``python -m benchmarks.plan [--cases delays dummy] [--quick] [--json FILE]``.

Five placements of each, forecast from one measurement (``plan --measure``) and run: the median second of a training
step, without the first, which starts simulators, and the last, which resets none ahead. The weights stay as they are:
episodes have their full length, which the forecast is of. Exits with 1 where one is off by more than a fifth. The
workers' CPU seconds are compared, too: a busy machine changes them less.

delays: a simulator and a policy that sleep, so that cores matter little. dummy: the toy env and an MLP, where messages
and updates are what takes time. libero: libero_spatial and the shipped policy, four envs of two tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from rich.console import Console
from rich.table import Table

from embodied_rl import launch
from embodied_rl.composition import config_of
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.models.base import Evaluation, PolicyOutput
from embodied_rl.models.mlp import MlpParams, MlpPolicy
from embodied_rl.plan import RunPlan
from embodied_rl.tasks.embodied import layouts
from embodied_rl.tasks.embodied.forecast import Layout, forecast
from embodied_rl.tasks.planning import plan_of

OFF = 0.2
PLACES = ((False, 1, 1), (False, 1, 2), (False, 2, 1), (False, 2, 2), (True, 1, 1))
"""(One process, env workers, stages)."""
FULL_LENGTH = (
    "actor.optim.lr=1e-30",
    "actor.skip_zero_advantages=false",
    "env.train.ignore_terminations=true",
    "runner.eval_at_end=false",
    "runner.save_interval=-1",
    "runner.report=false",
    "runner.logger.logger_backends=[jsonl]",
)
CASES: Mapping[str, Sequence[str]] = {
    "delays": (
        "experiment=dummy_ppo",
        "env.env_type=benchmarks.plan:DelayedEnv",
        "env.init_params.step_s=0.001",
        "model.model_type=benchmarks.plan:DelayedPolicy",
        "model.params.act_s=0.03",
        "env.train.total_num_envs=16",
    ),
    "dummy": ("experiment=dummy_grpo",),
    "libero": (
        "env=libero_spatial",
        "env.task_ids=[0,5]",
        "algorithm=ppo",
        "env.train.total_num_envs=4",
        "env.train.max_episode_steps=64",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedParams(DummyParams):
    step_s: NonNegativeFloat = 0.0
    """Of an env's control step, of no processor."""


class DelayedEnv(DummyEnv):
    Params = DelayedParams
    batched = False

    def __init__(self, num_slots: int, params: DelayedParams, seed: int) -> None:
        super().__init__(num_slots, params, seed)
        self._step_s = params.step_s

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        time.sleep(self._step_s * len(slots))
        return super().step(slots, actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedMlpParams(MlpParams):
    act_s: NonNegativeFloat = 0.0
    """Of a forward pass, whatever its size."""
    evaluate_s: NonNegativeFloat = 0.0
    """Of one in an update."""


class DelayedPolicy(MlpPolicy):
    Params = DelayedMlpParams

    def __init__(self, spec: Any, params: DelayedMlpParams) -> None:
        super().__init__(spec, params)
        self._act_s, self._evaluate_s = params.act_s, params.evaluate_s

    def act(self, *args: Any, **options: Any) -> PolicyOutput:
        time.sleep(self._act_s)
        return super().act(*args, **options)

    def evaluate(self, *args: Any, **options: Any) -> Evaluation:
        time.sleep(self._evaluate_s)
        return super().evaluate(*args, **options)


def took(plan: RunPlan[Any], layout: Layout, steps: int) -> tuple[float, float]:
    """Seconds of a training step of a run in this layout: by the clock, and its workers' on cores."""
    run_dir = launch.carry_out(plan_of(layouts.laid_out(plan, layout)), quiet=True)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    middle = [row for row in rows if "time/step" in row][1 : steps - 1]
    cpu = [row["cpu/env"] + row["cpu/rollout"] + row["cpu/actor"] for row in middle]
    return median(row["time/step"] for row in middle), median(cpu)


def compare(case: str, steps: int, folder: str) -> list[dict[str, Any]]:
    """A row for each placement."""
    plan = plan_of(
        config_of(*CASES[case], *FULL_LENGTH, f"runner.max_steps={steps}", f"runner.output_dir={folder}/{case}")
    )
    own = layouts.present(plan)
    found = [
        Layout(
            serial=serial,
            env_workers=workers,
            stages=stages,
            actor_threads=own.actor_threads,
            micro_batch=own.micro_batch,
        )
        for serial, workers, stages in PLACES
    ]
    costs = layouts.measured(plan, found, launch.make_backend, lambda text: None)
    shape, rows = layouts.step_shape(plan), []
    for layout in found:
        expected, (step, cpu) = forecast(shape, costs, layout), took(plan, layout, steps)
        where = "serial" if layout.serial else f"{layout.env_workers} x {layout.stages}"
        rows.append(
            {
                "case": case,
                "env workers x stages": where,
                "forecast": expected.step,
                "limit": expected.limit,
                "run": step,
                "ratio": expected.step / step,
                "CPU s": expected.cpu,
                "of the run": cpu,
                "its ratio": expected.cpu / cpu,
            }
        )
        print(json.dumps(rows[-1]), flush=True)  # the rest may take minutes
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="fewer training steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for case in options.cases for row in compare(case, 5 if options.quick else 10, folder)]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()))
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    off = [row for row in rows if abs(row["ratio"] - 1) > OFF]
    print(f"pass line: within {OFF:.0%}; {len(rows) - len(off)} of {len(rows)} are")
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    main()
