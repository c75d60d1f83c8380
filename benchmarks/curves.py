"""Learning curves over several seeds: success or held-out accuracy against training step and wall time.

    python -m benchmarks.curves math | push_cube | libero --init RUN | runs RUN...
        [--seeds 0,1,2] [--output DIR] [--plot-only] [--quick] [key=value ...]

Every seed is trained by the documented commands, one after another. ``curve.csv`` and ``curve.png`` show each seed, the
mean and its 95 % interval: Student's t over the seeds. Wall time is all of it: earlier commands (the imitation that
``math`` starts from), start-up, training, evaluations. ``runs`` draws runs that there are; of those only training and
evaluations are known. Further ``key=value`` go to the last command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.learning_curve import METRICS, Curve, Point, draw, points, reached, read_curve, write_csv
from embodied_rl.monitoring.jsonl_file import FILE_NAME

ROOT = Path(__file__).parents[1]
TIMES_FILE = "times.json"
EVAL_ALONE = ("runner.val_before_train=true", "runner.eval_at_end=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a seed is trained. ``{seed}`` and ``{folder}`` are filled in; the last command's run is drawn."""

    title: str
    commands: tuple[tuple[str, ...], ...]
    quick: tuple[tuple[str, ...], ...]
    """Added to each command by ``--quick``."""
    goal: float | None = None
    """What every seed has to reach ..."""
    minutes: float | None = None
    """... within this wall time. None: nothing is demanded."""


_MATH_SEED = ("data.seed={seed}", "actor.seed={seed}", "runner.output_dir={folder}")
RECIPES: Mapping[str, Recipe] = {
    "math": Recipe(
        title="sums of two-digit numbers: GRPO after imitation",
        commands=(
            ("experiment=arithmetic_sft", *_MATH_SEED, "runner.eval_at_end=false"),
            ("experiment=arithmetic_grpo", *_MATH_SEED, *EVAL_ALONE),
        ),
        quick=(
            ("runner.max_steps=20", "runner.save_interval=20"),
            ("runner.max_steps=4", "runner.val_check_interval=2"),
        ),
        goal=0.75,
        minutes=5,
    ),
    "push_cube": Recipe(
        title="ManiSkill PushCube: PPO from random weights",
        commands=(("experiment=push_cube_ppo", "actor.seed={seed}", "runner.output_dir={folder}", *EVAL_ALONE),),
        quick=(("runner.max_steps=2", "runner.val_check_interval=1"),),
        goal=0.9,
        minutes=15,
    ),
    "libero": Recipe(
        title="LIBERO: reinforcement learning from a warm start",
        commands=(
            (
                "task=embodied",
                "actor.seed={seed}",
                "runner.output_dir={folder}",
                "env.eval.video_cfg.save_video=false",
                *EVAL_ALONE,
            ),
        ),
        quick=(("runner.max_steps=1", "env.eval.episodes_per_task=1"),),
    ),
}


def train(recipe: Recipe, seed: int, folder: Path, extra: Sequence[str], quick: bool, console: Console) -> None:
    """Run a seed's commands and note how long each took."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder}: holds runs already; choose another --output, or --plot-only to draw those")
    folder.mkdir(parents=True, exist_ok=True)
    seconds = []
    for place, command in enumerate(recipe.commands):
        words = [word.format(seed=seed, folder=folder) for word in command]
        words += [*(recipe.quick[place] if quick else ()), *(extra if place == len(recipe.commands) - 1 else ())]
        console.print(f"seed {seed}: python train.py {' '.join(words)}", highlight=False, soft_wrap=True)
        start, log = time.perf_counter(), folder / f"command_{place}.log"
        with log.open("wb") as file, console.status(f"seed {seed} ..."):
            command_line = [sys.executable, "train.py", *words]
            status = subprocess.run(command_line, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
        if status:
            sys.exit(f"the command failed; the end of {log}:\n{log.read_text()[-3000:]}")
        seconds.append(time.perf_counter() - start)
        console.print(f"seed {seed}: took {_minutes(seconds[-1])}", highlight=False)
    (folder / TIMES_FILE).write_text(json.dumps({"command_seconds": seconds}) + "\n")


def trained(folder: Path, seed: int) -> Curve:
    """The curve of the run that :func:`train` made last.

    What the last command took beyond training and evaluations (start-up, checkpoints, its end) counts as if it had all
    come first, so that no evaluation seems earlier than it was.
    """
    runs = sorted(path.parent for path in folder.glob(f"*/*/{FILE_NAME}"))
    if not runs or not (folder / TIMES_FILE).exists():
        sys.exit(f"{folder}: holds no finished run of seed {seed}; leave out --plot-only to make one")
    curve = read_curve(max(runs, key=lambda run: run.name), name=f"seed {seed}")
    taken = json.loads((folder / TIMES_FILE).read_text())["command_seconds"]
    before = sum(taken) - curve.seconds[-1]
    return replace(curve, seconds=[before + seconds for seconds in curve.seconds])


def report(curves: Sequence[Curve], goal: float | None, minutes: float | None) -> tuple[Table, list[str]]:
    """A row for each seed, and what was missed."""
    table = Table(title=f"{METRICS[curves[0].metric]}, %")
    for column in ("", "before", "after", "best", "steps", "wall time", *([f"≥ {100 * goal:g} %"] if goal else [])):
        table.add_column(column, justify="right" if column else "left")
    missed = []
    for curve in curves:
        cells = [f"{100 * v:.1f}" for v in (curve.values[0], curve.values[-1], max(curve.values))]
        cells += [str(curve.steps[-1]), _minutes(curve.seconds[-1])]
        if goal is not None:
            at = reached(curve, goal)
            cells.append("never" if at is None else f"step {at[0]}, {_minutes(at[1])}")
            if at is None or (minutes is not None and at[1] > 60 * minutes):
                missed.append(f"{curve.name}: {100 * goal:g} % within {minutes:g} minutes")
        table.add_row(curve.name, *cells)
    if len(curves) > 1:
        first, last = points(curves)[0], points(curves)[-1]
        table.add_section()
        table.add_row("mean", f"{100 * first.mean:.1f}", f"{100 * last.mean:.1f}", "", str(last.step), "")
        table.add_row("95 %, t", *(f"{100 * low:.1f}–{100 * high:.1f}" for low, high in map(_ends, (first, last))))
    return table, missed


def _ends(point: Point) -> tuple[float, float]:
    assert point.interval is not None  # more than one seed
    return point.interval


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {seconds % 60:02.0f} s"


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name in (*RECIPES, "runs"):
        sub = names.add_parser(name)
        sub.add_argument("--output", type=Path, metavar="DIR", help="default: .benchmarks/curves/<name>")
        if name == "runs":
            sub.add_argument("run", type=Path, nargs="+", help="a run directory for each seed")
            continue
        sub.add_argument("--seeds", default="0,1,2", help="comma-separated")
        sub.add_argument("--plot-only", action="store_true", help="draw the runs that are in the output folder")
        sub.add_argument("--quick", action="store_true", help="a few steps: shows that it works, judges nothing")
        if name == "libero":
            sub.add_argument("--init", required=True, metavar="RUN", help="what runner.init_from takes")
    options, extra = parser.parse_known_args(arguments)
    if wrong := [word for word in extra if "=" not in word or word.startswith("-") or options.name == "runs"]:
        parser.error(f"got {' '.join(wrong)}, expected options (see --help) or key=value for the last command")
    return options, extra


def main(arguments: Sequence[str] | None = None) -> None:
    options, extra = parse(arguments)
    console = Console()
    output: Path = (options.output or ROOT / ".benchmarks" / "curves" / options.name).resolve()
    output.mkdir(parents=True, exist_ok=True)
    goal: float | None = None
    minutes: float | None = None
    if options.name == "runs":
        title, curves = "", [read_curve(run, name=run.resolve().name) for run in options.run]
    else:
        recipe = RECIPES[options.name]
        title, goal, minutes = recipe.title, recipe.goal, recipe.minutes
        if options.name == "libero":
            extra = [f"runner.init_from={Path(options.init).resolve()}", *extra]
        try:
            seeds = [int(seed) for seed in options.seeds.split(",")]
        except ValueError:
            sys.exit(f"--seeds: got {options.seeds!r}, expected whole numbers such as 0,1,2")
        curves = []
        for seed in seeds:
            folder = output / f"seed_{seed}"
            if not options.plot_only:
                train(recipe, seed, folder, extra, options.quick, console)
            curves.append(trained(folder, seed))
    write_csv(output / "curve.csv", curves)
    draw(output / "curve.png", curves, title=title, goal=goal, minutes=minutes)
    table, missed = report(curves, goal, minutes)
    console.print(table)
    console.print(f"{output / 'curve.csv'}\n{output / 'curve.png'}", highlight=False, soft_wrap=True)
    if missed and not getattr(options, "quick", False):
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
