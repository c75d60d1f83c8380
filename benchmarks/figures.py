"""What recipes of :mod:`benchmarks.curves` last reached: ``benchmarks/figures.json``, which makes docs/figures.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.guard import machine
from benchmarks.learning_curve import METRICS, Curve

RECORD: Final = Path(__file__).with_name("figures.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedFigure:
    """One seed, from its first command to its last evaluation."""

    seed: int
    before: float
    """Share of successes, or of right answers."""
    after: float
    episodes: int | None
    """Of an evaluation; None where they are not independent trials of one kind."""
    steps: int
    wall_s: float
    cpu_s: float
    """Of all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A recipe's seeds in one command."""

    metric: str
    date: str
    machine: str
    passed: bool
    """Whether every seed did what the recipe demands."""
    seeds: tuple[SeedFigure, ...]


def measured(curves: Sequence[Curve], seeds: Sequence[int], cpu_s: Sequence[float], *, passed: bool) -> Figure:
    return Figure(
        metric=METRICS[curves[0].metric],
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        passed=passed,
        seeds=tuple(
            SeedFigure(
                seed=seed,
                before=round(curve.values[0], 4),
                after=round(curve.values[-1], 4),
                episodes=None if curve.episodes is None else curve.episodes[-1],
                steps=curve.steps[-1],
                wall_s=round(curve.seconds[-1]),
                cpu_s=round(cpu),
            )
            for curve, seed, cpu in zip(curves, seeds, cpu_s, strict=True)
        ),
    )


def read() -> dict[str, Figure]:
    """Recipe -> its figure; without the file none."""
    if not RECORD.exists():
        return {}
    return {
        name: Figure(**{**row, "seeds": tuple(SeedFigure(**seed) for seed in row["seeds"])})
        for name, row in json.loads(RECORD.read_text()).items()
    }


def write(figures: Mapping[str, Figure]) -> None:
    RECORD.write_text(json.dumps({name: asdict(figures[name]) for name in sorted(figures)}, indent=2) + "\n")


def row(name: str, recipe_page: str, title: str, demanded: str, figure: Figure | None) -> str:
    """A recipe's line of docs/figures.md."""
    cells = [f"[`{name}`]({recipe_page})", title, demanded or "none"]
    if figure is None:
        return f"| {' | '.join(cells)} | not recorded yet | | | | | |"
    before, after = (_listed(values) for values in zip(*((s.before, s.after) for s in figure.seeds), strict=True))
    wall, cpu = ([round(getattr(seed, key) / 60) for seed in figure.seeds] for key in ("wall_s", "cpu_s"))
    counts = {seed.episodes for seed in figure.seeds} - {None}
    episodes = f" of {counts.pop()}" if len(counts) == 1 else ""
    cells += [
        "reached" if figure.passed else "**missed**",
        ", ".join(str(seed.seed) for seed in figure.seeds),
        f"{before} → {after}{episodes}",
        f"{_span(wall)}, {_span(cpu)}",
        figure.date,
        figure.machine,
    ]
    return f"| {' | '.join(cells)} |"


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares)


def _span(minutes: Sequence[int]) -> str:
    low, high = min(minutes), max(minutes)
    return str(low) if low == high else f"{low} to {high}"
