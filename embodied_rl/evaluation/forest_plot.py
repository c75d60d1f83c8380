"""A comparison as a picture: each task's difference with its interval. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import Comparison

_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write the picture; its format is that of the file's ending.

    Raises:
        UserError: matplotlib is not installed, or it does not know the ending.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("--plot: needs matplotlib, which is not installed: pip install matplotlib") from None

    rows = [*comparisons[0].tasks, comparisons[0].overall]
    figure = Figure(figsize=(8, 1.1 + 0.55 * len(rows) * max(1, 0.6 * len(comparisons))), layout="constrained")
    axes = figure.subplots()
    for place, comparison in enumerate(comparisons):
        estimates = [row.difference for row in (*comparison.tasks, comparison.overall)]
        centres = [100 * estimate.value for estimate in estimates]
        heights = [-row - 0.6 * (place - (len(comparisons) - 1) / 2) / len(comparisons) for row in range(len(rows))]
        intervals = [estimate.interval or (estimate.value, estimate.value) for estimate in estimates]
        reach = (
            [max(centre - 100 * low, 0.0) for centre, (low, _) in zip(centres, intervals, strict=True)],
            [max(100 * high - centre, 0.0) for centre, (_, high) in zip(centres, intervals, strict=True)],
        )
        name = f"{comparison.second.name} - {comparison.first.name}"
        axes.errorbar(
            centres, heights, xerr=reach, fmt="o", capsize=4, color=_COLOURS[place % len(_COLOURS)], label=name
        )
    labels = [textwrap.fill(f"{row.task}  {row.label}" if row.label else "-", 44) for row in rows[:-1]]
    axes.set_yticks([-row for row in range(len(rows))], [*labels, "all"], fontsize=9)
    axes.axhline(-len(rows) + 1.5, color="0.7", linewidth=0.8)
    axes.axvline(0, color="0.3", linewidth=1, linestyle="--")
    axes.set_xlabel("difference in percentage points, with 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(comparisons), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"--plot {path}: {error}") from None
