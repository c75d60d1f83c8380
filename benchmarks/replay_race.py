"""How much less play a replay buffer needs than PPO to equal success.

    python -m benchmarks.replay_race [pendulum libero_spatial] [--seeds 0,1,2] [--output DIR] [--plot-only] [--quick]

Both sides of a race train with every seed, one after the other, each run on one core. Play is counted until the first
evaluation on held-out initial states at the threshold. Replay is evaluated about three times as often for the same
play, so that neither side is timed more finely. Two seeds or more give a 95 % interval of the ratio, Welch's t on the
logarithms. ``race.csv`` and ``race.png`` show all evaluations. It fails where the ratio of geometric means is
above a third, or where a seed never comes to the threshold.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_ind

from benchmarks.curves import ROOT, WIDTH, Line, Recipe, newest_run, seed_list, train
from embodied_rl.monitoring.builtin import METRICS_FILE

SIDES: Final = ("replay", "PPO")
RATIO: Final = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A task, and how either side trains on it. Words have ``{seed}`` and ``{folder}`` as those of a recipe."""

    title: str
    metric: str
    """Of an evaluation."""
    thresholds: tuple[float, float]
    """Of either side's metric, whose rewards may have another scale."""
    unit: str
    counted: str
    """The metric of a training step that says how much was played in it."""
    commands: tuple[tuple[str, ...], tuple[str, ...]]
    quick: tuple[str, ...]


_RUN: Final = (
    "actor.seed={seed}",
    "env.seed={seed}",
    "runner.output_dir={folder}",
    "runner.val_before_train=true",
    "env.eval.video_cfg.save_video=false",
    "cluster=serial",
    "cluster.num_threads.actor=1",
)
RACES: Final[Mapping[str, Race]] = {
    "pendulum": Race(
        title="Pendulum: return of -250",
        metric="eval/return",
        thresholds=(-250.0, -25.0),
        unit="env steps",
        counted="env/steps",
        commands=(
            (
                "experiment=pendulum_sac",
                "algorithm.replay.update_to_data=4",
                "runner.max_steps=84",
                "runner.val_check_interval=9",  # 360 env steps
                "env.eval.episodes_per_task=20",
                *_RUN,
            ),
            (
                "experiment=pendulum_ppo",
                "runner.val_check_interval=1",  # 1,024
                "env.eval.episodes_per_task=20",
                *_RUN,
            ),
        ),
        quick=("runner.max_steps=2", "runner.val_check_interval=1", "env.eval.episodes_per_task=1"),
    ),
    "libero_spatial": Race(
        title="libero_spatial, task 2, from weights that hardly succeed: half of the episodes",
        metric="eval/success_rate",
        thresholds=(0.5, 0.5),
        unit="episodes",
        counted="env/episodes",
        commands=(
            ("experiment=libero_spatial_residual", "runner.val_check_interval=2", *_RUN),  # 32 episodes
            (
                "experiment=libero_spatial_ppo",
                "env.task_ids=[2]",
                "env.train.total_num_envs=32",
                "runner.max_steps=18",
                "runner.val_check_interval=3",  # 96
                *_RUN,
            ),
        ),
        quick=(
            "runner.max_steps=1",
            "runner.val_check_interval=1",
            "env.train.max_episode_steps=16",
            "env.eval.episodes_per_task=1",
            "env.eval.max_episode_steps=16",
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run's evaluations."""

    seed: int
    play: list[int]
    """Until each, in the race's unit."""
    values: list[float]

    def until(self, threshold: float) -> int | None:
        """Play until the first evaluation after some that is at the threshold or above; None: there is none."""
        found = zip(self.play, self.values, strict=True)
        return next((play for play, value in found if play > 0 and value >= threshold), None)


def read(run: Path, race: Race, seed: int) -> Played:
    """The evaluations in a run's ``metrics.jsonl``."""
    played, play, values = 0.0, [], []
    for line in map(json.loads, (run / METRICS_FILE).read_text().splitlines()):
        played += line.get(race.counted, 0.0)
        if line.get(race.metric) is not None:
            play.append(round(played))
            values.append(line[race.metric])
    return Played(seed=seed, play=play, values=values)


def ratio(replay: Sequence[float], ppo: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The first geometric mean by the second, and its 95 % interval by Welch's t; None for fewer than two seeds."""
    logs = [[math.log(count) for count in counts] for counts in (replay, ppo)]
    mean = math.exp(statistics.mean(logs[0]) - statistics.mean(logs[1]))
    if min(map(len, logs)) < 2:
        return mean, None
    ends = ttest_ind(*logs, equal_var=False).confidence_interval()
    return mean, (math.exp(ends.low), math.exp(ends.high))


def report(race: Race, sides: Sequence[Sequence[Played]]) -> tuple[Table, str | None]:
    """A row for each side, and what was missed."""
    table = Table(title=f"{race.title}: {race.unit} until then")
    for column in ("", *(f"seed {run.seed}" for run in sides[0]), "geometric mean"):
        table.add_column(column, justify="right" if column else "left")
    counts = [[run.until(threshold) for run in runs] for runs, threshold in zip(sides, race.thresholds, strict=True)]
    found = [[count for count in row if count is not None] for row in counts]
    for side, row, known in zip(SIDES, counts, found, strict=True):
        mean = f"{statistics.geometric_mean(known):,.0f}" if len(known) == len(row) else ""
        table.add_row(side, *("never" if count is None else f"{count:,}" for count in row), mean)
    if missing := [side for side, row, known in zip(SIDES, counts, found, strict=True) if len(known) < len(row)]:
        return table, f"{race.title}: {' and '.join(missing)} not with every seed"
    mean, ends = ratio(*found)
    interval = "" if ends is None else f", 95 % {ends[0]:.2f} to {ends[1]:.2f}"
    table.caption = f"replay needs {mean:.2f} of PPO's {race.unit}{interval}"
    return table, None if mean < RATIO + 1e-9 else f"{race.title}: a ratio of {mean:.2f}, expected {RATIO:.2f} at most"


def write_csv(path: Path, race: Race, sides: Sequence[Sequence[Played]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["side", "seed", race.unit.replace(" ", "_"), race.metric])
        for side, runs in zip(SIDES, sides, strict=True):
            for run in runs:
                writer.writerows([side, run.seed, *point] for point in zip(run.play, run.values, strict=True))


def draw(path: Path, race: Race, sides: Sequence[Sequence[Played]]) -> None:
    """All runs, each side's metric in units of its threshold where that is not the same."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (side, runs) in enumerate(zip(SIDES, sides, strict=True)):
        scale = race.thresholds[0] / race.thresholds[number]
        for run in runs:
            label = side if run is runs[0] else None
            values = [scale * value for value in run.values]
            panel.plot(run.play, values, color=f"C{number}", linewidth=1, alpha=0.8, marker=".", label=label)
    panel.axhline(race.thresholds[0], color="tab:red", linestyle="--", linewidth=1, label="threshold")
    panel.set_xlim(left=0)
    panel.set(xlabel=race.unit, ylabel=race.metric, title=race.title)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run(name: str, options: argparse.Namespace, console: Console) -> str | None:
    """Train both sides of a race; what was missed."""
    race, output = RACES[name], options.output.resolve() / name
    sides: list[list[Played]] = []
    for side, words in zip(SIDES, race.commands, strict=True):
        recipe = Recipe(title=race.title, page="replay.md", commands=(words,), quick=(race.quick,), line=Line())
        folders = {seed: output / f"{side.lower()}_{seed}" for seed in options.seeds}
        for seed, folder in folders.items():
            if not options.plot_only:
                train(recipe, seed, folder, (), options.quick, console)
        sides.append([read(newest_run(folder, seed), race, seed) for seed, folder in folders.items()])
    write_csv(output / "race.csv", race, sides)
    draw(output / "race.png", race, sides)
    table, missed = report(race, sides)
    console.print(table)
    console.print(f"{output / 'race.csv'}\n{output / 'race.png'}", highlight=False, soft_wrap=True)
    return missed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_race", description=__doc__)
    parser.add_argument("races", nargs="*", metavar="RACE", help=f"of {', '.join(RACES)}; default: all")
    parser.add_argument("--seeds", default="0,1,2", type=seed_list, help="comma-separated")
    parser.add_argument("--output", type=Path, metavar="DIR", default=ROOT / ".benchmarks" / "replay_race")
    parser.add_argument("--plot-only", action="store_true", help="read the runs that are in the output folder")
    parser.add_argument("--quick", action="store_true", help="a step or two: shows that it works, judges nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.races if name not in RACES]:
        parser.error(f"got {', '.join(unknown)}, expected of {', '.join(RACES)}")
    console = Console()
    console.width = max(console.width, WIDTH)  # where it is no terminal
    missed = [run(name, options, console) for name in options.races or RACES]
    if any(missed) and not options.quick:
        sys.exit(f"missed: {'; '.join(text for text in missed if text)}")


if __name__ == "__main__":
    main()
