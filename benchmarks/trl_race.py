"""A GRPO step of ours beside TRL's ``GRPOTrainer``: the same model, data, reward, batch, group, length and loss.

    python -m benchmarks.trl_race [--quick] [--json FILE]

Both start from the same folder: ``experiment=arithmetic_sft``, exported. The first call makes it, which takes two
minutes, and keeps it in ``.benchmarks/trl_race``. A step is that of ``experiment=arithmetic_grpo``: 64 prompts, 8
completions each of at most 24 tokens, 4 optimiser steps. Every round runs each variant in processes of its own, one
after another, so that all meet the same load of the machine. The first two steps of a run do not count. TRL runs with
one thread and with two; the faster one is what ours is compared with. Needs the peers' environment
(``benchmarks/peers/setup.sh``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers import environment
from embodied_rl.cli import config_of
from embodied_rl.data.prompts import build_dataset
from embodied_rl.monitoring.jsonl_file import FILE_NAME
from embodied_rl.schema import MathConfig

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".benchmarks" / "trl_race"
LINE, GOAL = 0.7, 0.5
"""Of TRL's time for a step."""
DROPPED = 2
"""First steps of a run: caches, threads and memory are not warm."""
POLL_S = 0.05

RECIPE = (
    "experiment=arithmetic_grpo",
    "model=causal_lm",
    "runner.init_from=null",
    "runner.val_before_train=false",
    "runner.val_check_interval=-1",
    "runner.eval_at_end=false",
    "runner.save_interval=-1",
    "runner.logger.logger_backends=[jsonl]",
    "cluster.num_threads={actor:1,rollout:1}",
    # As model=tiny_lm, whose export the folder is.
    "actor.micro_batch_size=128",
    "actor.optim.lr=1e-4",
)
OURS: Mapping[str, tuple[str, ...]] = {
    "ours, on-policy": (),
    "ours, on-policy, two workers each": ("cluster.component_placement={actor:0-1,rollout:0-1}",),
    "ours, overlapped": ("rollout.max_staleness=1",),
}
THREADS: Mapping[str, int] = {"TRL, 1 thread": 1, "TRL, 2 threads": 2}
PHASES: Mapping[str, tuple[str, ...]] = {
    "generation": ("time/generate", "generation"),
    "reward": ("time/reward", "reward"),
    "old log-probabilities": ("time/scoring", "log-probabilities"),
    "advantages": ("time/advantage", "advantages"),
    "update": ("time/update", "forward", "backward", "optimizer"),
    "weight sync": ("time/sync",),
}
"""Row of the table -> what it is called in ours and in TRL's times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of one run that count."""

    seconds: list[float]
    """Wall time of each step."""
    loop: float
    """Mean wall seconds from one step's end to the next one's: with all that comes between steps."""
    cpu: dict[str, float]
    """CPU seconds of a step by process (ours) or by phase (TRL's)."""
    phases: dict[str, float]
    """Mean wall seconds of a step by phase, in the table's words."""
    accuracy: float
    length: float
    """Mean tokens of a completion."""
    groups_equal: float
    """Share of groups with equal scores, which teach nothing."""
    skipped: float
    """Share of samples that the update left out."""

    @property
    def cpu_total(self) -> float:
        return sum(self.cpu.values())


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


def warm_start(console: Console) -> Path:
    """The folder that every run starts from; made where it is not there yet."""
    recipe = (ROOT / "config" / "experiment" / "arithmetic_sft.yaml").read_bytes()
    name = f"warm_start_{hashlib.sha256(recipe).hexdigest()[:8]}"
    folder = CACHE / name
    if not folder.exists():
        runs = CACHE / f"{name}_runs"
        shutil.rmtree(runs, ignore_errors=True)
        console.print(f"warm start: experiment=arithmetic_sft, once; it stays in {folder.relative_to(ROOT)}")
        train = ["experiment=arithmetic_sft", f"runner.output_dir={runs}", "runner.val_check_interval=-1"]
        quietly([sys.executable, "train.py", *train])
        quietly([sys.executable, "train.py", "export", str(runs / "arithmetic_sft"), str(folder)])
        shutil.rmtree(runs)
    return folder


def quietly(command: Sequence[str]) -> None:
    """Run a command; its output is shown only where it fails."""
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")


def run_ours(overrides: Sequence[str], model: Path, steps: int) -> Measured:
    """A run by the documented command; one more step than counts, whose rollout would have no update beside it."""
    with tempfile.TemporaryDirectory(dir=CACHE) as output:
        command = [sys.executable, "train.py", *RECIPE, *overrides]
        command += [f"model.path={model}", f"runner.output_dir={output}", f"runner.max_steps={steps + 1}"]
        log = Path(output, "log.txt")
        with log.open("wb") as file:
            process = psutil.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
            watch = Watch(process, lambda: next(Path(output).glob(f"*/*/{FILE_NAME}"), None))
            while process.poll() is None:
                watch.look()
                time.sleep(POLL_S)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
        metrics = next(Path(output).glob(f"*/*/{FILE_NAME}")).read_text().splitlines()
    return ours_measured([json.loads(line) for line in metrics[:steps]], watch.marks[:steps])


def ours_measured(metrics: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, dict[str, float]]]) -> Measured:
    """From the lines of metrics.jsonl and what was seen when each of them came."""
    counted, (start, before), (end, after) = metrics[DROPPED:], marks[DROPPED - 1], marks[-1]
    count = len(counted)

    def average(name: str) -> float:
        return mean(line.get(name, 0.0) for line in counted)

    return Measured(
        seconds=[line["time/step"] for line in counted],
        loop=(end - start) / count,
        cpu={name: (used - before.get(name, 0.0)) / count for name, used in after.items()},
        phases={phase: average(names[0]) for phase, names in PHASES.items()},
        accuracy=average("rollout/accuracy"),
        length=average("rollout/length"),
        groups_equal=average("actor/groups_equal"),
        skipped=average("actor/samples_skipped"),
    )


def run_trl(threads: int, model: Path, steps: int) -> tuple[Measured, dict[str, str]]:
    """A run in the peers' environment; also the versions of its packages."""
    with tempfile.TemporaryDirectory(dir=CACHE) as output:
        source, target = Path(output, "input.json"), Path(output, "output.json")
        source.write_text(json.dumps(trl_input(threads, model, steps)))
        log = Path(output, "log.txt")
        with log.open("wb") as file:
            done = subprocess.run(
                [environment.PYTHON, "-W", "ignore", "-m", "benchmarks.peers.trl_training", source, target],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
                check=False,
            )
        if done.returncode:
            sys.exit(f"TRL's run failed:\n{log.read_text()[-3000:]}")
        answer = json.loads(target.read_text())
    return trl_measured(answer["steps"]), answer["versions"]


def trl_input(threads: int, model: Path, steps: int) -> dict[str, Any]:
    """Ours in TRL's words: prompts in our order, and every number from our configuration."""
    config = config_of(*RECIPE, f"model.path={model}")
    assert isinstance(config, MathConfig)
    data, algorithm, optim = config.data, config.algorithm, config.actor.optim
    assert algorithm.loss_agg_func == "token-mean" and algorithm.norm_std and not algorithm.kl_beta
    dataset = build_dataset(data.dataset, data.params)
    problems = [
        p for step in range(steps) for p in dataset.draw(seed=data.seed, step=step, count=data.rollout_batch_size)
    ]
    return {
        "threads": threads,
        "model": str(model),
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


def trl_measured(steps: Sequence[Mapping[str, Any]]) -> Measured:
    """From what :mod:`benchmarks.peers.trl_training` wrote."""
    counted = steps[DROPPED:]

    def average(kind: str, names: Sequence[str]) -> float:
        return sum(mean(step["phases"][name][kind] for step in counted) for name in names)

    cpu = {phase: average("cpu", names[1:]) for phase, names in PHASES.items() if names[1:]}
    return Measured(
        seconds=[step["wall"] for step in counted],
        loop=mean(step["wall"] for step in counted),
        cpu=cpu | {"rest": mean(step["cpu"] for step in counted) - sum(cpu.values())},
        phases={phase: average("wall", names[1:]) for phase, names in PHASES.items()},
        accuracy=mean(step["accuracy"] for step in counted),
        length=mean(step["length"] for step in counted),
        groups_equal=mean(step["groups_equal"] for step in counted),
        skipped=0.0,
    )


def race(rounds: int, steps: int, console: Console) -> dict[str, Any]:
    """Every round's :class:`Measured` by variant, and TRL's versions."""
    model, versions = warm_start(console), {}
    found: dict[str, list[Measured]] = {name: [] for name in (*OURS, *THREADS)}
    for number in range(1, rounds + 1):
        for name in found:
            if name in OURS:
                measured = run_ours(OURS[name], model, steps + DROPPED)
            else:
                measured, versions = run_trl(THREADS[name], model, steps + DROPPED)
            found[name].append(measured)
            console.print(
                f"round {number} of {rounds}: {name}: {median(measured.seconds):.2f} s a step", highlight=False
            )
    return {"variants": found, "versions": versions}


def faster(found: Mapping[str, Sequence[Measured]]) -> str:
    """The TRL variant that ours is compared with."""
    return min(THREADS, key=lambda name: median(step for measured in found[name] for step in measured.seconds))


def ratios(found: Mapping[str, Sequence[Measured]], name: str) -> list[float]:
    """Each round's median step over that of the faster TRL variant in the same round."""
    return [
        median(own.seconds) / median(trl.seconds) for own, trl in zip(found[name], found[faster(found)], strict=True)
    ]


def verdict(ratio: float) -> str:
    return f"goal ({GOAL})" if ratio <= GOAL else f"line ({LINE})" if ratio <= LINE else "missed"


def summary(found: Mapping[str, Sequence[Measured]]) -> Table:
    table = Table(title="64 prompts × 8 completions, up to 24 tokens, 4 optimiser steps: seconds a step")
    for column in (
        "",
        "median",
        "with gaps",
        "÷ TRL's",
        "by round",
        "CPU s",
        "cores busy",
        "right",
        "tokens",
        "reached",
    ):
        table.add_column(column, justify="left" if column in ("", "reached") else "right")
    for name, runs in found.items():
        by_round = ratios(found, name)
        ratio = median(by_round)
        loop, cpu = mean(run.loop for run in runs), mean(run.cpu_total for run in runs)
        table.add_row(
            name,
            f"{median(step for run in runs for step in run.seconds):.2f}",
            f"{loop:.2f}",
            f"{ratio:.2f}",
            f"{min(by_round):.2f}–{max(by_round):.2f}",
            f"{cpu:.2f}",
            f"{cpu / loop:.2f}",
            f"{mean(run.accuracy for run in runs):.0%}",
            f"{mean(run.length for run in runs):.1f}",
            verdict(ratio) if name in OURS else "",
        )
    return table


def breakdown(found: Mapping[str, Sequence[Measured]]) -> Table:
    """Where a step's wall time goes, and whose CPU time it is."""
    table = Table(title="where it goes: mean seconds a step, wall (TRL: wall, CPU)")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")

    def row(title: str, cell: Callable[[str, Sequence[Measured]], str], **style: Any) -> None:
        table.add_row(title, *(cell(name, runs) for name, runs in found.items()), **style)

    for phase in PHASES:

        def of_phase(name: str, runs: Sequence[Measured], phase: str = phase) -> str:
            wall = mean(run.phases[phase] for run in runs)
            cpu = "" if name in OURS or phase not in runs[0].cpu else f", {mean(run.cpu[phase] for run in runs):.2f}"
            return f"{wall:.2f}{cpu}"

        row(phase, of_phase)

    def rest(name: str, runs: Sequence[Measured]) -> str:
        left = mean(mean(run.seconds) - sum(run.phases.values()) for run in runs)
        if OURS.get(name) == OURS["ours, overlapped"]:
            return f"{max(left, 0.0):.2f} ({max(-left, 0.0):.2f} at the same time)"
        return f"{left:.2f}" + ("" if name in OURS else f", {mean(run.cpu['rest'] for run in runs):.2f}")

    row("rest", rest, end_section=True)
    processes = {name for ours in OURS for run in found[ours] for name in run.cpu}
    for process in sorted(processes):
        row(
            f"CPU s: {process}",
            lambda name, runs, process=process: (
                f"{mean(run.cpu.get(process, 0.0) for run in runs):.2f}" if name in OURS else ""
            ),
        )
    row("groups of equal scores", lambda _, runs: f"{mean(run.groups_equal for run in runs):.0%}")
    row("samples left out of the update", lambda _, runs: f"{mean(run.skipped for run in runs):.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_race", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few steps, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's numbers there")
    options = parser.parse_args()
    console = Console()
    if not environment.exists():
        console.print(f"TRL is not measured: {environment.HOW_TO_MAKE}")
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    answer = race(1 if options.quick else 3, 4 if options.quick else 10, console)
    found: dict[str, list[Measured]] = answer["variants"]
    console.print(summary(found))
    console.print(breakdown(found))
    versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    console.print(f"{versions}; compared with {faster(found)}; the line is {LINE}, the goal {GOAL}", highlight=False)
    if options.json:
        variants = {name: [asdict(run) for run in runs] for name, runs in found.items()}
        text = json.dumps(
            {"versions": answer["versions"], "compared_with": faster(found), "variants": variants}, indent=2
        )
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
