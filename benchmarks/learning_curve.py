"""Evaluations of several runs as one curve: read from ``metrics.jsonl``, averaged, written and drawn."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from embodied_rl.monitoring.jsonl_file import FILE_NAME

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
    path = run / FILE_NAME
    if not path.exists():
        sys.exit(f"{run}: holds no {FILE_NAME}; expected a run directory whose runner.logger has the backend jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    metric = next((key for key in METRICS if any(key in line for line in lines)), None)
    if metric is None:
        sys.exit(f"{run}: holds no evaluation ({' or '.join(METRICS)}); set runner.val_check_interval in that run")
    steps, values, seconds, passed = [], [], [], before
    for line in lines:
        passed += line.get("time/step", 0.0) + line.get("eval/seconds", 0.0)
        if line.get(metric) is not None:
            steps.append(line["step"])
            values.append(line[metric])
            seconds.append(passed)
    return Curve(name=name, metric=metric, steps=steps, values=values, seconds=seconds)


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
    """Two panels: against training steps and against wall minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    averaged = points(curves)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, label in zip(panels, ("training step", "wall time, minutes"), strict=True):
        by_time = panel is panels[1]
        for curve in curves:
            x = [s / 60 for s in curve.seconds] if by_time else curve.steps
            panel.plot(x, [100 * v for v in curve.values], linewidth=0.9, alpha=0.7, marker=".", label=curve.name)
        x = [point.seconds / 60 if by_time else point.step for point in averaged]
        if len(curves) > 1:
            ends = [point.interval or (point.mean, point.mean) for point in averaged]
            low, high = ([100 * end for end in side] for side in zip(*ends, strict=True))
            panel.fill_between(x, low, high, color="black", alpha=0.15, linewidth=0, label="95 % interval (t)")
            panel.plot(x, [100 * point.mean for point in averaged], color="black", linewidth=2, label="mean")
        if goal is not None:
            panel.axhline(100 * goal, color="tab:red", linestyle="--", linewidth=1, label=f"line: {100 * goal:g} %")
        if minutes is not None and by_time:
            panel.axvline(minutes, color="tab:red", linestyle=":", linewidth=1, label=f"line: {minutes:g} min")
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=not by_time))
        panel.set_ylim(-2, 102)  # points at 0 and 100 % whole
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"{METRICS[curves[0].metric]}, %")
    panels[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
