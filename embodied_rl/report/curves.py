"""Runs side by side: which are seeds of one recipe, and a metric's mean over them with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from embodied_rl.params import flat, shown
from embodied_rl.report.data import Run, Series

Axis = Literal["steps", "env steps", "seconds"]
CONFIDENCE: Final = 0.95
MOST_POINTS: Final = 300
_OF_A_SEED: Final = ("runner.output_dir", "runner.experiment_name", "runner.resume_dir", "runner.report")
"""Keys that may differ between the runs of a recipe, beside seeds and folders of videos."""
_NAMED_BY: Final = 2
"""A recipe with more settings of its own goes by its run's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that differ in seeds alone."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one run."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric of a group: the mean over its runs where all of them have it."""

    name: str
    mean: Line
    low: tuple[float, ...] | None
    """Lower ends of 95 % intervals by Student's t; None of a single run."""
    high: tuple[float, ...] | None
    singles: tuple[Line, ...]
    """The runs, where there are several."""


def groups(runs: Sequence[Run]) -> list[Group]:
    """The runs by recipe, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(repr(sorted(_recipe(run).items(), key=str)), []).append(run)
    names = _names([alike[0] for alike in found.values()])
    return [Group(name=name, runs=tuple(alike)) for name, alike in zip(names, found.values(), strict=True)]


def _recipe(run: Run) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat(run.config)
        if key not in _OF_A_SEED and key.rpartition(".")[2] not in ("seed", "video_base_dir")
    }


def _names(firsts: Sequence[Run]) -> list[str]:
    """Of each recipe the settings in which it differs; else its experiment, or its run's name."""
    recipes = [_recipe(run) for run in firsts]
    keys = [
        key for key in dict.fromkeys(key for r in recipes for key in r) if len({repr(r.get(key)) for r in recipes}) > 1
    ]
    if 0 < len(keys) <= _NAMED_BY:
        return [", ".join(f"{key}={shown(recipe.get(key))}" for key in keys) for recipe in recipes]
    experiments = [run.experiment for run in firsts]
    return experiments if len(set(experiments)) == len(experiments) else [f"{r.experiment}/{r.name}" for r in firsts]


def curve(group: Group, metric: str, axis: Axis) -> Curve | None:
    """A metric over an axis; None where no step has it in all runs.

    Several runs meet at training steps; a step's place on another axis is the mean of theirs.
    """
    series = [
        dict(zip(found.steps, found.values, strict=True)) for found in map(lambda r: r.series(metric), group.runs)
    ]
    places = [_places(run, axis) for run in group.runs]
    steps = sorted(
        set.intersection(*(values.keys() & place.keys() for values, place in zip(series, places, strict=True)))
    )
    if not steps:
        return None
    x = [statistics.fmean(place[step] for place in places) for step in steps]
    values = [[run[step] for run in series] for step in steps]
    mean = [statistics.fmean(of_step) for of_step in values]
    if len(group.runs) == 1:
        return Curve(name=group.name, mean=thinned(x, mean), low=None, high=None, singles=())
    halves = [half_width(of_step) for of_step in values]
    least = 0.0 if min(map(min, values)) >= 0 else -math.inf  # what is never negative has no interval below 0
    return Curve(
        name=group.name,
        mean=thinned(x, mean),
        low=thinned(x, [max(m - h, least) for m, h in zip(mean, halves, strict=True)]).y,
        high=thinned(x, [m + h for m, h in zip(mean, halves, strict=True)]).y,
        singles=tuple(
            thinned([place[step] for step in steps], [run[step] for step in steps])
            for place, run in zip(places, series, strict=True)
        ),
    )


def _places(run: Run, axis: Axis) -> Mapping[int, float]:
    if axis == "env steps":
        return run.env_steps()
    if axis == "seconds":
        return run.seconds()
    return {row["step"]: float(row["step"]) for row in run.rows}


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> Line:
    """At most so many points: means of neighbours."""
    size = math.ceil(len(x) / most)
    parts = range(0, len(x), size or 1)
    return Line(
        x=tuple(statistics.fmean(x[start : start + size]) for start in parts),
        y=tuple(statistics.fmean(y[start : start + size]) for start in parts),
    )


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean by Student's t, of at least two values."""
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@cache
def t_quantile(freedom: int) -> float:
    """The number that Student's t stays within, either way, with a probability of 95 %.

    With t = sqrt(f) tan(a) the density is that of cos(a)^(f - 1), which is summed up here.
    """
    angles = np.linspace(0, math.pi / 2, 1_000_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE * below[-1], below, angles)))


def task_series(run: Run, prefix: str) -> dict[str, Series]:
    """Task, as metrics name it -> its success over the steps."""
    names = [name for name in run.metrics() if name.startswith(prefix) and name.endswith("/success")]
    return {name.removeprefix(prefix).removesuffix("/success"): run.series(name) for name in sorted(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Success of each task over the steps, the mean over a group's runs."""

    steps: tuple[tuple[int, int], ...]
    """First and last training step of each column."""
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Task, and its success in each column; None where it was not played."""


def heat_map(group: Group, prefix: str, most: int = 60) -> HeatMap | None:
    """Success by task from metrics below ``prefix``; None without two tasks and two steps."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in group.runs:
        for task, series in task_series(run, prefix).items():
            for step, value in zip(series.steps, series.values, strict=True):
                found.setdefault(task, {}).setdefault(step, []).append(value)
    steps = sorted({step for by_step in found.values() for step in by_step})
    if len(found) < 2 or len(steps) < 2:
        return None
    size = math.ceil(len(steps) / most)
    columns = [steps[start : start + size] for start in range(0, len(steps), size)]

    def cell(by_step: Mapping[int, list[float]], column: Sequence[int]) -> float | None:
        values = [value for step in column for value in by_step.get(step, [])]
        return statistics.fmean(values) if values else None

    return HeatMap(
        steps=tuple((column[0], column[-1]) for column in columns),
        rows=tuple((task, tuple(cell(found[task], column) for column in columns)) for task in sorted(found)),
    )
