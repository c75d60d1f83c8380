"""Rollouts against their ideal, with simulators and a policy that sleep: ``python -m benchmarks.pipelining [--quick]``.

``two stages``: one env worker whose chunks take as long as the policy's turns. While one stage's envs move, the policy
acts for the other, so a rollout could take as long as the env worker's chunks and the first turn. ``unequal``: four env
workers, the fastest half again as fast as the slowest; a rollout could take what the slowest needs. Sleeping needs no
core, so what is missing to these is messages, waits, and what the policy and the toy env do beside sleeping.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from rich.console import Console
from rich.table import Table

from benchmarks.plan import FULL_LENGTH
from embodied_rl import launch
from embodied_rl.composition import config_of
from embodied_rl.envs.base import SimStep
from embodied_rl.envs.dummy import DummyEnv, DummyParams

CHUNK, CHUNKS, ENVS = 4, 16, 8
"""Control steps of a chunk, chunks of a rollout, envs of an env worker and stage."""
PARTS = (1.0, 0.9, 0.8, 2 / 3)
"""What the unequal workers' chunks take, as parts of the slowest's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingParams(DummyParams):
    step_s: NonNegativeFloat = 0.0
    """Of a control step of all slots."""
    parts: tuple[float, ...] = (1.0,)
    """Of ``step_s``, a worker each."""
    counter: str = ""
    """A file that grows by a byte for each worker that has its part, where there are several."""


class SleepingEnv(DummyEnv):
    """The toy env, in a time that is given."""

    Params = SleepingParams
    part: float | None = None
    """This process's, of several: its stages share it."""

    def __init__(self, num_slots: int, params: SleepingParams, seed: int) -> None:
        super().__init__(num_slots, params, seed)
        several = len(params.parts) > 1
        if several and SleepingEnv.part is None:
            file = os.open(params.counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, b".")
            number = os.lseek(file, 0, os.SEEK_CUR) - 1  # where the append ended
            os.close(file)
            SleepingEnv.part = params.parts[number % len(params.parts)]
        self._step_s = params.step_s * (SleepingEnv.part or params.parts[0])

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> SimStep:
        time.sleep(self._step_s)
        return super().step(slots, actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    workers: int
    parts: Sequence[float]
    chunk_s: float
    """Of the slowest worker's stage."""
    act_s: float
    line: float
    """Share of the ideal to reach, at least."""

    @property
    def ideal_s(self) -> float:
        return 2 * CHUNKS * self.chunk_s + self.act_s


CASES = {
    "two stages": Case(workers=1, parts=(1.0,), chunk_s=0.1, act_s=0.1, line=0.95),
    "four unequal env workers": Case(workers=4, parts=PARTS, chunk_s=0.1, act_s=0.02, line=0.9),
}


def rollouts(case: Case, steps: int, folder: Path) -> list[float]:
    """Seconds of each rollout but the first, in which workers load what they need."""
    folder.mkdir()
    config = config_of(
        "experiment=dummy_ppo",
        "env.env_type=benchmarks.pipelining:SleepingEnv",
        f"env.init_params.step_s={case.chunk_s / CHUNK}",
        f"env.init_params.parts=[{','.join(map(str, case.parts))}]",
        f"env.init_params.counter={folder / 'workers'}",
        "model.model_type=benchmarks.plan:DelayedPolicy",
        f"model.params.act_s={case.act_s}",
        f"model.num_action_chunks={CHUNK}",
        f"env.train.total_num_envs={2 * case.workers * ENVS}",
        f"env.train.max_episode_steps={CHUNK * CHUNKS}",
        f"cluster.component_placement.env={'0' if case.workers == 1 else f'0-{case.workers - 1}'}",
        "rollout.pipeline_stage_num=2",
        f"runner.max_steps={steps + 1}",
        f"runner.output_dir={folder}",
        *FULL_LENGTH,
    )
    run_dir = launch.run(config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["time/rollout"] for row in rows if "time/step" in row][1:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelining", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    table = Table("case", "rollouts, s", "ideal, s", "reached", "line")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            seconds = rollouts(case, 3 if options.quick else 9, Path(folder) / name.replace(" ", "_"))
            reached = case.ideal_s / median(seconds)
            found[name] = {"rollout_s": seconds, "ideal_s": case.ideal_s, "reached": reached, "line": case.line}
            shown = f"{min(seconds):.2f} to {max(seconds):.2f}"
            table.add_row(name, shown, f"{case.ideal_s:.2f}", f"{reached:.3f}", f"{case.line}")
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    missed = [name for name, case in CASES.items() if found[name]["reached"] < case.line]
    sys.exit(f"below the line: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
