"""Runs whose env workers are killed, beside runs that nobody disturbs: ``python -m benchmarks.killed OVERRIDES``.

For each seed the run is made twice, the second time with a random env worker killed (SIGKILL) every few seconds, at
most once a training step: where rollouts take longer than the time between kills none would ever end. Lost rollouts are
made again, so the two should log the same, number for number: that is what passes.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.logged import repeatable


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    status: int
    seconds: float
    kills: int
    lines: Sequence[Mapping[str, Any]]
    """Of ``metrics.jsonl``, without what depends on the clock."""
    restarts: int

    def last(self, metric: str) -> float | None:
        """The metric's newest value."""
        return next((line[metric] for line in reversed(self.lines) if metric in line), None)


def play(overrides: Sequence[str], out: Path, every: float | None, seed: int) -> Outcome:
    """Make a run; with ``every``, kill one of its env workers so many seconds after the last, in a step of its own."""
    out.mkdir(parents=True)
    command = [sys.executable, "train.py", *overrides, f"actor.seed={seed}", f"env.seed={seed}", "runner.report=false"]
    command += [f"runner.output_dir={out}", f"env.eval.video_cfg.video_base_dir={out}", "env.max_restarts=1000000"]
    rng, kills, began, killed_in = random.Random(seed), 0, time.monotonic(), 0
    with (out / "run.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        due = began + (every or 0.0)
        while process.poll() is None:
            time.sleep(0.2)
            if every is None or time.monotonic() < due or (logged := len(_logged(out))) == killed_in:
                continue
            workers = [child for child in psutil.Process(process.pid).children() if "EnvGroup" in child.name()]
            if workers:
                rng.choice(workers).send_signal(signal.SIGKILL)
                kills += 1
            due, killed_in = time.monotonic() + every, logged
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in _logged(out)]
    restarts = max((int(line.get("env/restarts", 0)) for line in lines), default=0)
    kept = [{key: value for key, value in repeatable(line).items() if key != "env/restarts"} for line in lines]
    return Outcome(status=process.returncode, seconds=seconds, kills=kills, lines=kept, restarts=restarts)


def _logged(out: Path) -> list[str]:
    """The lines of the run's ``metrics.jsonl``; none before the first step is finished."""
    file = next(out.glob("*/*/metrics.jsonl"), None)
    return [] if file is None else file.read_text().splitlines()


def same(left: Outcome, right: Outcome) -> bool:
    """Whether both runs came to their end and logged the same."""
    return left.status == right.status == 0 and list(left.lines) == list(right.lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.killed", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="between two kills")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/killed"), help="a folder that is not there yet")
    parser.add_argument("overrides", nargs="*", help="of train.py: experiment=dummy_grpo")
    options = parser.parse_intermixed_args()
    table = Table(title=f"an env worker killed every {options.every:g} s: undisturbed | disturbed")
    for column in ("seed", "seconds", "kills", "restarts", "success at the end", "logged the same"):
        table.add_column(column, justify="right")
    good = True
    for seed in range(options.seeds):
        calm = play(options.overrides, options.out / f"{seed}_undisturbed", None, seed)
        killed = play(options.overrides, options.out / f"{seed}_disturbed", options.every, seed)
        good = good and same(calm, killed) and killed.kills > 0
        success = [run.last("eval/success_rate") for run in (calm, killed)]
        table.add_row(
            str(seed),
            f"{calm.seconds:.0f} | {killed.seconds:.0f}",
            str(killed.kills),
            str(killed.restarts),
            " | ".join("-" if rate is None else f"{rate:.1%}" for rate in success),
            "yes" if same(calm, killed) else f"no (exit status {calm.status} | {killed.status})",
        )
    Console().print(table, "passes" if good else "fails")
    sys.exit(not good)


if __name__ == "__main__":
    main()
