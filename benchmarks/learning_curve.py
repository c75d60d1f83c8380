"""Evaluations of several runs as one curve: read from ``metrics.jsonl``, averaged, written and drawn."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from embodied_rl.evaluation.success import wilson_interval
from embodied_rl.monitoring.builtin import METRICS_FILE

METRICS = {"eval/accuracy": "held-out accuracy", "eval/success_rate": "success rate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One seed's evaluations."""

    name: str
    metric: str
    steps: list[int]
    values: list[float]
    """Shares, 0 to 1."""
    seconds: list[float]
    """Wall time until each evaluation was done."""
    episodes: list[int] | None = None
    """Of each evaluation; None where they are not independent trials of one kind."""

    def interval(self, place: int) -> tuple[float, float] | None:
        """95 % by Wilson, of one evaluation alone; None without ``episodes``."""
        if self.episodes is None:
            return None
        count = self.episodes[place]
        return wilson_interval(round(self.values[place] * count), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All seeds after the same training step."""

    step: int
    seconds: float
    """Mean over the seeds."""
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % by Student's t, cut at 0 and 1; None for a single seed."""
        count = len(self.values)
        if count < 2:
            return None
        half = float(student.ppf(0.975, count - 1)) * statistics.stdev(self.values) / math.sqrt(count)
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


def read_curve(run: Path, *, name: str, before: float = 0.0) -> Curve:
    """The evaluations in a run's ``metrics.jsonl``.

    Args:
        before: wall seconds that passed before the first step, over and above training and evaluations.
    """
    path = run / METRICS_FILE
    if not path.exists():
        sys.exit(f"{run}: holds no {METRICS_FILE}; expected a run directory whose runner.logger has the backend jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    metric = next((key for key in METRICS if any(key in line for line in lines)), None)
    if metric is None:
        sys.exit(f"{run}: holds no evaluation ({' or '.join(METRICS)}); set runner.val_check_interval in that run")
    steps, values, seconds, episodes, passed = [], [], [], [], before
    for line in lines:
        passed += line.get("time/step", 0.0) + line.get("eval/seconds", 0.0)
        if line.get(metric) is not None:
            steps.append(line["step"])
            values.append(line[metric])
            seconds.append(passed)
            episodes.append(int(line.get("eval/episodes", 0)))
    known = episodes if all(episodes) else None
    return Curve(name=name, metric=metric, steps=steps, values=values, seconds=seconds, episodes=known)


def points(curves: Sequence[Curve]) -> list[Point]:
    """The training steps after which every seed was evaluated."""
    by_step = [dict(zip(c.steps, zip(c.values, c.seconds, strict=True), strict=True)) for c in curves]
    common = sorted(set.intersection(*(set(steps) for steps in by_step)))
    if not common:
        sys.exit("these runs have no training step in common after which all were evaluated")
    return [
        Point(
            step=step,
            seconds=statistics.mean(steps[step][1] for steps in by_step),
            values=tuple(steps[step][0] for steps in by_step),
        )
        for step in common
    ]


def reached(curve: Curve, goal: float) -> tuple[int, float] | None:
    """The first evaluated step at ``goal`` or above, and the wall seconds until then."""
    found = zip(curve.steps, curve.seconds, curve.values, strict=True)
    return next(((step, seconds) for step, seconds, value in found if value >= goal), None)


def write_csv(path: Path, curves: Sequence[Curve]) -> None:
    """Shares from 0 to 1, seconds of wall time."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "wall_s", "mean", "ci95_low", "ci95_high", *(curve.name for curve in curves)])
        for point in points(curves):
            ends = ("", "") if point.interval is None else (f"{end:.6g}" for end in point.interval)
            values = (f"{value:.6g}" for value in point.values)
            writer.writerow([point.step, f"{point.seconds:.1f}", f"{point.mean:.6g}", *ends, *values])


def draw(path: Path, curves: Sequence[Curve], *, title: str, goal: float | None, minutes: float | None) -> None:
    """Each seed, their mean and its interval in two panels: against training steps and against wall minutes."""
    with _panels(path, title, curves[0].metric) as panels:
        for panel, by_time in panels:
            for curve in curves:
                panel.plot(*_line(curve, by_time), linewidth=0.9, alpha=0.7, marker=".", label=curve.name)
            if len(curves) > 1:
                _mean(panel, curves, by_time, colour="black", label="mean")
            if goal is not None:
                panel.axhline(100 * goal, color="tab:red", linestyle="--", linewidth=1, label=f"line: {100 * goal:g} %")
            if minutes is not None and by_time:
                panel.axvline(minutes, color="tab:red", linestyle=":", linewidth=1, label=f"line: {minutes:g} min")


def draw_comparison(path: Path, recipes: Mapping[str, Sequence[Curve]], *, title: str) -> None:
    """The seeds' mean of several recipes, with intervals; the seeds thin, in the same colour."""
    with _panels(path, title, next(iter(recipes.values()))[0].metric) as panels:
        for panel, by_time in panels:
            for number, (name, curves) in enumerate(recipes.items()):
                for curve in curves:
                    panel.plot(*_line(curve, by_time), color=f"C{number}", linewidth=0.7, alpha=0.5)
                _mean(panel, curves, by_time, colour=f"C{number}", label=name)


def _line(curve: Curve, by_time: bool) -> tuple[list[float], list[float]]:
    x = [s / 60 for s in curve.seconds] if by_time else [float(step) for step in curve.steps]
    return x, [100 * value for value in curve.values]


def _mean(panel: Any, curves: Sequence[Curve], by_time: bool, *, colour: str, label: str) -> None:
    averaged = points(curves)
    x = [point.seconds / 60 if by_time else point.step for point in averaged]
    if len(curves) > 1:
        ends = [point.interval or (point.mean, point.mean) for point in averaged]
        low, high = ([100 * end for end in side] for side in zip(*ends, strict=True))
        panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, label=f"{label}: 95 % (t)")
    panel.plot(x, [100 * point.mean for point in averaged], color=colour, linewidth=2, label=label)


@contextmanager
def _panels(path: Path, title: str, metric: str) -> Iterator[list[tuple[Any, bool]]]:
    """Panels with axes to draw in, and whether each is over time; saved when all is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    yield list(zip(panels, (False, True), strict=True))
    for panel, label in zip(panels, ("training step", "wall time, minutes"), strict=True):
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=panel is panels[0]))
        panel.set_ylim(-2, 102)  # points at 0 and 100 % whole
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"{METRICS[metric]}, %")
    panels[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
