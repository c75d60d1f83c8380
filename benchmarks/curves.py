"""Learning curves over several seeds: success or held-out accuracy against training step and wall time.

    python -m benchmarks.curves math | push_cube | push_cube_grpo | libero_spatial | libero_spatial_short
        | libero_spatial_residual | libero_spatial_new | libero_goal | libero_10 | libero_10_short
        | runs RUN... [--seeds 0,1,2] [--output DIR] [--plot-only] [--quick] [--record] [key=value ...]
    python -m benchmarks.curves all [--seeds 0] [--output DIR] [--quick] [--record]
    python -m benchmarks.curves compare FOLDER FOLDER...

Every seed is trained by the documented commands, one after another. ``curve.csv`` and ``curve.png`` show each seed, the
mean and its 95 % interval: Student's t over the seeds. Wall time is all of it: earlier commands (the imitation that
``math`` starts from), start-up, training, evaluations. ``runs`` draws runs that there are; of those only training and
evaluations are known. ``compare`` draws the means of recipes that were trained before. Further ``key=value`` go to the
last command. ``all`` trains every recipe that has to learn something, one after another. ``--record`` writes what was
reached to ``benchmarks/figures.json``, of which docs/figures.md is made.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import figures
from benchmarks.learning_curve import (
    METRICS,
    Curve,
    Point,
    draw,
    draw_comparison,
    points,
    reached,
    read_curve,
    write_csv,
)
from embodied_rl.monitoring.builtin import METRICS_FILE

ROOT = Path(__file__).parents[1]
TIMES_FILE = "times.json"
ALL = "all"
WIDTH = 110
"""Columns that the tables take."""
EVAL_ALONE = ("runner.val_before_train=true", "runner.eval_at_end=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What counts as learned. Without any of these nothing is demanded."""

    goal: float | None = None
    """Share of successes or right answers to reach."""
    gain: float | None = None
    """How much higher it has to end than it began, the 95 % Wilson intervals of the two evaluations apart."""
    minutes: float | None = None
    """Wall time for either."""

    def in_words(self) -> str:
        goal = [f"{100 * self.goal:g} %"] if self.goal is not None else []
        gain = [f"{100 * self.gain:g} points more, intervals apart"] if self.gain is not None else []
        time = [f"within {self.minutes:g} minutes"] if self.minutes is not None else []
        return ", ".join([*goal, *gain, *time])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a seed is trained. ``{seed}`` and ``{folder}`` are filled in; the last command's run is drawn."""

    title: str
    page: str
    """Of docs/: what the figures mean."""
    commands: tuple[tuple[str, ...], ...]
    quick: tuple[tuple[str, ...], ...]
    """Added to each command by ``--quick``."""
    line: Line
    """What every seed has to do."""


_MATH_SEED = ("data.seed={seed}", "actor.seed={seed}", "runner.output_dir={folder}")
_SIM_SEED = ("actor.seed={seed}", "runner.output_dir={folder}")
_LIBERO_QUICK = (("runner.max_steps=1", "env.eval.episodes_per_task=1", "env.train.max_episode_steps=16"),)
_NO_VIDEO = ("env.eval.video_cfg.save_video=false",)
RECIPES: Mapping[str, Recipe] = {
    "math": Recipe(
        title="sums of two-digit numbers: GRPO after imitation",
        page="math.md",
        commands=(
            ("experiment=arithmetic_sft", *_MATH_SEED, "runner.eval_at_end=false"),
            ("experiment=arithmetic_grpo", *_MATH_SEED, *EVAL_ALONE),
        ),
        quick=(
            ("runner.max_steps=20", "runner.save_interval=20"),
            ("runner.max_steps=4", "runner.val_check_interval=2"),
        ),
        line=Line(goal=0.75, minutes=5),
    ),
    "push_cube": Recipe(
        title="ManiSkill PushCube: PPO from random weights",
        page="maniskill.md",
        commands=(("experiment=push_cube_ppo", *_SIM_SEED, *EVAL_ALONE),),
        quick=(("runner.max_steps=2", "runner.val_check_interval=1"),),
        line=Line(goal=0.9, minutes=15),
    ),
    "push_cube_grpo": Recipe(
        title="ManiSkill PushCube: GRPO from random weights",
        page="maniskill.md",
        commands=(("experiment=push_cube_grpo", *_SIM_SEED, *EVAL_ALONE),),
        quick=(("runner.max_steps=2", "runner.val_check_interval=1"),),
        line=Line(),
    ),
    "libero_spatial": Recipe(
        title="three tasks of libero_spatial: PPO from shipped weights",
        page="libero_training.md",
        commands=(("experiment=libero_spatial_ppo", *_SIM_SEED, *_NO_VIDEO, *EVAL_ALONE),),
        quick=_LIBERO_QUICK,
        line=Line(gain=0.15, minutes=60),
    ),
    "libero_spatial_short": Recipe(
        title="a task of libero_spatial: PPO from shipped weights",
        page="libero_training.md",
        commands=(
            (
                "experiment=libero_spatial_ppo",
                "env.task_ids=[8]",
                "env.train.total_num_envs=32",
                "runner.max_steps=8",
                *_SIM_SEED,
                *_NO_VIDEO,
                *EVAL_ALONE,
            ),
        ),
        quick=_LIBERO_QUICK,
        line=Line(gain=0.15, minutes=10),
    ),
    "libero_spatial_residual": Recipe(
        title="a task of libero_spatial that hardly succeeds: corrections from a replay buffer",
        page="replay.md",
        commands=(("experiment=libero_spatial_residual", *_SIM_SEED, *_NO_VIDEO, *EVAL_ALONE),),
        quick=_LIBERO_QUICK,
        line=Line(gain=0.15, minutes=15),
    ),
    "libero_spatial_new": Recipe(
        title="a task of libero_spatial that the weights never saw: 200 demonstrations",
        page="libero_training.md",
        commands=(
            (
                "experiment=libero_spatial_new_collect",
                "collect.seed={seed}",
                "runner.output_dir={folder}",
            ),
            ("experiment=libero_spatial_new_sft", "data.seed={seed}", *_SIM_SEED, *_NO_VIDEO, *EVAL_ALONE),
        ),
        quick=(
            ("collect.episodes_per_task=2",),
            ("runner.max_steps=1", "env.eval.episodes_per_task=1", "env.eval.max_episode_steps=16"),
        ),
        line=Line(goal=0.9, minutes=45),
    ),
    "libero_goal": Recipe(
        title="all ten tasks of libero_goal at once: PPO from shipped weights",
        page="libero_training.md",
        commands=(("experiment=libero_goal_rl", *_SIM_SEED, *_NO_VIDEO, *EVAL_ALONE),),
        quick=_LIBERO_QUICK,
        line=Line(goal=0.65, minutes=30),
    ),
    "libero_10": Recipe(
        title="a task of libero_10: PPO from shipped weights",
        page="libero_training.md",
        commands=(("experiment=libero_10_ppo", *_SIM_SEED, *_NO_VIDEO, *EVAL_ALONE),),
        quick=_LIBERO_QUICK,
        line=Line(gain=0.15, minutes=30),
    ),
    "libero_10_short": Recipe(
        title="python train.py task=embodied env=libero_10",
        page="libero_training.md",
        commands=(("experiment=libero_10_short", *_SIM_SEED),),
        quick=_LIBERO_QUICK,
        line=Line(gain=0.15, minutes=15),
    ),
}


def train(recipe: Recipe, seed: int, folder: Path, extra: Sequence[str], quick: bool, console: Console) -> None:
    """Run a seed's commands and note how long each took."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder}: holds runs already; choose another --output, or --plot-only to draw those")
    folder.mkdir(parents=True, exist_ok=True)
    seconds, cpu_seconds = [], []
    for place, command in enumerate(recipe.commands):
        words = [word.format(seed=seed, folder=folder) for word in command]
        words += [*(recipe.quick[place] if quick else ()), *(extra if place == len(recipe.commands) - 1 else ())]
        console.print(f"seed {seed}: python train.py {' '.join(words)}", highlight=False, soft_wrap=True)
        start, spent, log = time.perf_counter(), _cpu_seconds(), folder / f"command_{place}.log"
        with log.open("wb") as file, console.status(f"seed {seed} ..."):
            command_line = [sys.executable, "train.py", *words]
            status = subprocess.run(command_line, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
        if status:
            sys.exit(f"the command failed; the end of {log}:\n{log.read_text()[-3000:]}")
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(_cpu_seconds() - spent)
        console.print(f"seed {seed}: took {_minutes(seconds[-1])}", highlight=False)
    (folder / TIMES_FILE).write_text(json.dumps({"command_seconds": seconds, "cpu_seconds": cpu_seconds}) + "\n")


def newest_run(folder: Path, seed: int) -> Path:
    """The run that :func:`train` made last in its folder."""
    runs = [path.parent for path in folder.glob(f"*/*/{METRICS_FILE}")]
    if not runs or not (folder / TIMES_FILE).exists():
        sys.exit(f"{folder}: holds no finished run of seed {seed}; leave out --plot-only to make one")
    return max(runs, key=lambda run: run.name)


def trained(folder: Path, seed: int) -> Curve:
    """The curve of the run that :func:`train` made last.

    What the last command took beyond training and evaluations (start-up, checkpoints, its end) counts as if it had all
    come first, so that no evaluation seems earlier than it was.
    """
    curve = read_curve(newest_run(folder, seed), name=f"seed {seed}")
    taken = _times(folder)["command_seconds"]
    before = sum(taken) - curve.seconds[-1]
    return replace(curve, seconds=[before + seconds for seconds in curve.seconds])


def report(curves: Sequence[Curve], line: Line) -> tuple[Table, list[str]]:
    """A row for each seed, and what was missed."""
    table = Table(title=f"{METRICS[curves[0].metric]}, %")
    at_goal = [f"≥ {100 * line.goal:g} %"] if line.goal else []
    for column in ("", "before", "after", "best", "steps", "wall time", *at_goal):
        table.add_column(column, justify="right" if column else "left")
    in_time = "" if line.minutes is None else f" within {line.minutes:g} minutes"
    missed = []
    for curve in curves:
        cells = [_with_interval(curve, 0), _with_interval(curve, -1), f"{100 * max(curve.values):.1f}"]
        cells += [str(curve.steps[-1]), _minutes(curve.seconds[-1])]
        if line.goal is not None:
            at = reached(curve, line.goal)
            cells.append("never" if at is None else f"step {at[0]}, {_minutes(at[1])}")
            if at is None or (line.minutes is not None and at[1] > 60 * line.minutes):
                missed.append(f"{curve.name}: {100 * line.goal:g} %{in_time}")
        if line.gain is not None and not _gained(curve, line.gain, line.minutes):
            missed.append(f"{curve.name}: {100 * line.gain:g} points more{in_time}, intervals apart")
        table.add_row(curve.name, *cells)
    if len(curves) > 1:
        first, last = points(curves)[0], points(curves)[-1]
        table.add_section()
        table.add_row("mean", f"{100 * first.mean:.1f}", f"{100 * last.mean:.1f}", "", str(last.step), "")
        table.add_row("95 %, t", *(f"{100 * low:.1f}–{100 * high:.1f}" for low, high in map(_ends, (first, last))))
    return table, missed


def _gained(curve: Curve, gain: float, minutes: float | None) -> bool:
    before, after = curve.interval(0), curve.interval(-1)
    apart = before is None or after is None or after[0] > before[1]
    in_time = minutes is None or curve.seconds[-1] <= 60 * minutes
    # Shares are fractions of a few hundred episodes: a billionth is rounding.
    return apart and in_time and curve.values[-1] - curve.values[0] > gain - 1e-9


def _with_interval(curve: Curve, place: int) -> str:
    ends = curve.interval(place)
    text = f"{100 * curve.values[place]:.1f}"
    return text if ends is None else f"{text} ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})"


def _ends(point: Point) -> tuple[float, float]:
    assert point.interval is not None  # more than one seed
    return point.interval


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {seconds % 60:02.0f} s"


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name in (*RECIPES, ALL, "compare", "runs"):
        sub = names.add_parser(name)
        sub.add_argument("--output", type=Path, metavar="DIR", help="default: .benchmarks/curves/<name>")
        if name == "runs":
            sub.add_argument("run", type=Path, nargs="+", help="a run directory for each seed")
            continue
        if name == "compare":
            sub.add_argument("recipe", type=Path, nargs="+", help="the output folders of trained recipes")
            continue
        seeds = "0" if name == ALL else "0,1,2"
        sub.add_argument("--seeds", default=seeds, type=seed_list, help="comma-separated")
        sub.add_argument("--plot-only", action="store_true", help="draw the runs that are in the output folder")
        sub.add_argument("--quick", action="store_true", help="a few steps: shows that it works, judges nothing")
        sub.add_argument("--record", action="store_true", help=f"write what was reached to {figures.RECORD.name}")
    options, extra = parser.parse_known_args(arguments)
    fixed = options.name in (ALL, "compare", "runs")
    if wrong := [word for word in extra if "=" not in word or word.startswith("-") or fixed]:
        parser.error(f"got {' '.join(wrong)}, expected options (see --help) or key=value for the last command")
    if getattr(options, "record", False) and (options.quick or extra):
        parser.error("--record: got --quick or key=value beside it, expected the recipe as it is")
    return options, extra


def seed_list(text: str) -> list[int]:
    """The value of ``--seeds``."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers such as 0,1,2") from None


def main(arguments: Sequence[str] | None = None) -> None:
    options, extra = parse(arguments)
    console = Console()
    console.width = max(console.width, WIDTH)  # where it is no terminal
    output: Path = (options.output or ROOT / ".benchmarks" / "curves" / options.name).resolve()
    if options.name == "compare":
        output.mkdir(parents=True, exist_ok=True)
        compare(options.recipe, output, console)
    elif options.name == "runs":
        show([read_curve(run, name=run.resolve().name) for run in options.run], output, Line(), "", console)
    else:
        names = [name for name in RECIPES if RECIPES[name].line != Line()] if options.name == ALL else [options.name]
        folders = [output / name for name in names] if options.name == ALL else [output]
        missed = [
            text
            for name, folder in zip(names, folders, strict=True)
            for text in _reach(name, options, folder, extra, console)
        ]
        if missed and not options.quick:
            sys.exit(f"missed: {'; '.join(missed)}")


def show(curves: Sequence[Curve], output: Path, line: Line, title: str, console: Console) -> list[str]:
    """Write and print a recipe's curves, and say what was missed."""
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "curve.csv", curves)
    draw(output / "curve.png", curves, title=title, goal=line.goal, minutes=line.minutes)
    table, missed = report(curves, line)
    console.print(table)
    console.print(f"{output / 'curve.csv'}\n{output / 'curve.png'}", highlight=False, soft_wrap=True)
    return missed


def _reach(name: str, options: argparse.Namespace, output: Path, extra: Sequence[str], console: Console) -> list[str]:
    """Train a recipe's seeds; what they missed."""
    recipe, curves, seeds = RECIPES[name], [], options.seeds
    for seed in seeds:
        folder = output / f"seed_{seed}"
        if not options.plot_only:
            train(recipe, seed, folder, extra, options.quick, console)
        curves.append(trained(folder, seed))
    missed = show(curves, output, recipe.line, recipe.title, console)
    if options.record:
        spent = [_times(output / f"seed_{seed}").get("cpu_seconds") for seed in seeds]
        if None in spent:
            sys.exit(f"{output}: an earlier version trained it, which noted no CPU time; train it anew to record it")
        figure = figures.measured(curves, seeds, [sum(cpu or ()) for cpu in spent], passed=not missed)
        figures.write({**figures.read(), name: figure})
    return [f"{name}, {text}" for text in missed]


def _times(folder: Path) -> dict[str, list[float]]:
    return json.loads((folder / TIMES_FILE).read_text())


def _cpu_seconds() -> float:
    """Of all commands so far, and of what they started."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def compare(folders: Sequence[Path], output: Path, console: Console) -> None:
    """Draw recipes that were trained before, each with all its seeds, into one picture."""
    recipes: dict[str, list[Curve]] = {}
    for folder in folders:
        seeds = sorted(int(path.name.removeprefix("seed_")) for path in folder.glob("seed_*"))
        if not seeds:
            sys.exit(f"{folder}: holds no seed_<number> folder; expected what another recipe's --output was")
        recipes[folder.resolve().name] = [trained(folder / f"seed_{seed}", seed) for seed in seeds]
    draw_comparison(output / "curve.png", recipes, title=" / ".join(recipes))
    for name, curves in recipes.items():
        table, _ = report(curves, Line())
        table.title = f"{name}: {table.title}"
        console.print(table)
        write_csv(output / f"{name}.csv", curves)
    console.print(f"{output / 'curve.png'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
