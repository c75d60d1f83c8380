"""A GRPO step of ours beside TRL's ``GRPOTrainer``: the same model, data, reward, batch, group, length and loss.

    python -m benchmarks.trl_race [--quick] [--json FILE]

Both start from the model that ships with the project. A step is that of ``python train.py task=math``: 64 prompts, 8
completions each of at most 24 tokens, 4 optimiser steps. Every round runs each variant in processes of its own, one
after another, so that all meet the same load of the machine. The first two steps of a run do not count. TRL runs with
one thread, with two and compiled; the fastest is what ours is compared with. Needs the peers' environment
(``benchmarks/peers/setup.sh``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from benchmarks.peers import environment
from benchmarks.trl_race_report import (
    DROPPED,
    GOAL,
    LEGEND,
    LINE,
    OURS,
    TRL,
    Measured,
    Peer,
    breakdown,
    fastest,
    ours_measured,
    ratios,
    summary,
    trl_measured,
)
from embodied_rl.cli import config_of
from embodied_rl.language.datasets.registry import build_dataset
from embodied_rl.monitoring.builtin import METRICS_FILE
from embodied_rl.schema import MathConfig

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".benchmarks" / "trl_race"
POLL_S = 0.05
WIDTH = 110
"""Columns that the tables take."""

RECIPE = (
    "task=math",
    "runner.val_before_train=false",
    "runner.val_check_interval=-1",
    "runner.eval_at_end=false",
    "runner.save_interval=-1",
    "runner.logger.logger_backends=[jsonl]",
)


class Watch:
    """The time, and the CPU seconds of each process of a run, whenever its metrics grow by a line."""

    def __init__(self, process: psutil.Process, find: Callable[[], Path | None]) -> None:
        self._process, self._find = process, find
        self.marks: list[tuple[float, dict[str, float]]] = []

    def look(self) -> None:
        path = self._find()
        lines = 0 if path is None else path.read_bytes().count(b"\n")
        if lines > len(self.marks):
            mark = (time.perf_counter(), self._cpu())
            self.marks += [mark] * (lines - len(self.marks))

    def _cpu(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                used, name = process.cpu_times(), process.name()
            except psutil.NoSuchProcess:
                continue
            name = "driver" if process == self._process else name.partition("[")[0]
            found[name] = found.get(name, 0.0) + used.user + used.system
        return found


def run_ours(overrides: Sequence[str], steps: int) -> Measured:
    """A run by the documented command; one more step than counts, whose rollout would have no update beside it."""
    with tempfile.TemporaryDirectory(dir=CACHE) as output:
        command = [sys.executable, "train.py", *RECIPE, *overrides]
        command += [f"runner.output_dir={output}", f"runner.max_steps={steps + 1}"]
        log = Path(output, "log.txt")
        with log.open("wb") as file:
            process = psutil.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
            watch = Watch(process, lambda: next(Path(output).glob(f"*/*/{METRICS_FILE}"), None))
            while process.poll() is None:
                watch.look()
                time.sleep(POLL_S)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
        metrics = next(Path(output).glob(f"*/*/{METRICS_FILE}")).read_text().splitlines()
    return ours_measured([json.loads(line) for line in metrics[:steps]], watch.marks[:steps])


def run_trl(peer: Peer, steps: int) -> tuple[Measured, dict[str, str]]:
    """A run in the peers' environment; also the versions of its packages."""
    with tempfile.TemporaryDirectory(dir=CACHE) as output:
        source, target = Path(output, "input.json"), Path(output, "output.json")
        source.write_text(json.dumps(trl_input(peer, steps)))
        log = Path(output, "log.txt")
        with log.open("wb") as file:
            done = subprocess.run(
                [environment.PYTHON, "-W", "ignore", "-m", "benchmarks.peers.trl_training", source, target],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(peer.threads), "HF_HUB_OFFLINE": "1"},
                check=False,
            )
        if done.returncode:
            sys.exit(f"TRL's run failed:\n{log.read_text()[-3000:]}")
        answer = json.loads(target.read_text())
    return trl_measured(answer["steps"]), answer["versions"]


def trl_input(peer: Peer, steps: int) -> dict[str, Any]:
    """Ours in TRL's words: prompts in our order, and every number from our configuration."""
    config = config_of(*RECIPE)
    assert isinstance(config, MathConfig)
    data, algorithm, optim = config.data, config.algorithm, config.actor.optim
    assert algorithm.loss_agg_func == "token-mean" and algorithm.norm_std and not algorithm.kl_beta
    dataset = build_dataset(data.dataset, data.params)
    problems = [
        p for step in range(steps) for p in dataset.draw(seed=data.seed, step=step, count=data.rollout_batch_size)
    ]
    return {
        **asdict(peer),
        "model": config.model.path,
        "problems": [[problem.prompt, problem.answer] for problem in problems],
        "steps": steps,
        "prompts_per_step": data.rollout_batch_size,
        "group_size": algorithm.group_size,
        "optimizer_steps": algorithm.n_minibatches,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": algorithm.sampling_params.temperature,
        "clip_ratio_low": algorithm.clip_ratio_low,
        "clip_ratio_high": algorithm.clip_ratio_high,
        "clip_ratio_c": algorithm.clip_ratio_c,
        "lr": optim.lr,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "adam_eps": optim.adam_eps,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip_grad,
        "seed": config.actor.seed,
    }


def race(rounds: int, steps: int, console: Console, ours: Sequence[str]) -> dict[str, Any]:
    """Every round's :class:`Measured` by variant, some of ours and all of TRL's, and TRL's versions."""
    versions: dict[str, str] = {}
    found: dict[str, list[Measured]] = {name: [] for name in (*ours, *TRL)}
    for number in range(1, rounds + 1):
        for name in found:
            if name in OURS:
                measured = run_ours(OURS[name], steps + DROPPED)
            else:
                measured, versions = run_trl(TRL[name], steps + DROPPED)
            found[name].append(measured)
            console.print(
                f"round {number} of {rounds}: {name}: {median(measured.seconds):.2f} s a step", highlight=False
            )
    return {"variants": found, "versions": versions}


def compared(answer: dict[str, Any]) -> dict[str, float]:
    runs = {name: [Measured(**run) for run in found] for name, found in answer["variants"].items()}
    return {f"TRL's step by that of {name}": 1 / median(ratios(runs, name)) for name in OURS if name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_race", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few steps, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", choices=OURS, help="these of ours, beside all of TRL's")
    options = parser.parse_args()
    console = Console()
    console.width = max(console.width, WIDTH)  # where it is no terminal
    if not environment.exists():
        console.print(f"TRL is not measured: {environment.HOW_TO_MAKE}")
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    answer = race(1 if options.quick else 3, 4 if options.quick else 10, console, options.only or list(OURS))
    found: dict[str, list[Measured]] = answer["variants"]
    console.print(summary(found))
    console.print(breakdown(found))
    console.print(LEGEND, highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    console.print(f"{versions}; compared with {fastest(found)}; the line is {LINE}, the goal {GOAL}", highlight=False)
    if options.json:
        variants = {name: [asdict(run) for run in runs] for name, runs in found.items()}
        text = json.dumps(
            {"versions": answer["versions"], "compared_with": fastest(found), "variants": variants}, indent=2
        )
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
