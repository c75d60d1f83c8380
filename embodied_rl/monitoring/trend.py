"""What matters of a step's metrics, in a line: the columns of every task, and how success goes over the steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Column:
    """A metric that is worth a column."""

    heading: str
    metric: str
    show: Callable[[float], str]
    width: int = 8

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The value in words; a dash where there is none."""
        value = metrics.get(self.metric)
        return "-" if value is None else self.show(value) if math.isfinite(value) else str(value)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _short(value: float) -> str:
    """At most seven characters."""
    size = abs(value)
    return f"{value:.1e}" if size >= 1e5 or 0 < size < 1e-3 else f"{value:.3g}" if size < 1e3 else f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


_GOALS: Final[Mapping[str, Sequence[Column]]] = {
    "env/episodes": (
        Column("success", "env/success_once", _percent),
        Column("return", "env/return", _short),
        Column("steps", "env/episode_len", _short, 6),
    ),
    "rollout/accuracy": (
        Column("accuracy", "rollout/accuracy", _percent),
        Column("score", "rollout/score", _short),
        Column("tokens", "rollout/length", _short, 7),
    ),
    "actor/policy_loss": (Column("loss", "actor/policy_loss", _short),),
}
"""Metric that a task logs in each step -> columns of what it is about; the first is the one whose trend is drawn."""
_COMMON: Final = (
    Column("s/step", "time/step", _seconds),
    Column("rollout", "time/rollout", _seconds),
    Column("update", "time/update", _seconds),
    Column("KL", "actor/approx_kl", _short),
    Column("entropy", "actor/entropy", _short),
    Column("gradient", "actor/grad_norm", _short, 9),
)
"""Columns of every task, in the order in which a narrow terminal keeps them."""
_EVALUATED: Final = {"eval/success_rate": "evaluated success", "eval/accuracy": "evaluated accuracy"}
ENV_STEPS: Final = "env/steps_total"
"""Metric: simulator steps of training, from the run's start."""
_TIMES: Final = 3
"""Of these, so many are times."""
_BARS: Final = "▁▂▃▄▅▆▇█"
TREND: Final = 16
"""Steps that the trend shows."""


def columns_of(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """The columns of a step's metrics, the most important first."""
    goal = next((columns for metric, columns in _GOALS.items() if metric in metrics), ())
    return (*goal, *(column for column in _COMMON if column.metric in metrics))


def overview(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few metrics that matter, under names that every tracker shows first: ``0_overview/success``."""
    goals = {column.heading: column.metric for column in columns_of(metrics) if column not in _COMMON}
    names = goals | {name: metric for metric, name in _EVALUATED.items()}
    return {f"0_overview/{name}": metrics[metric] for name, metric in names.items() if metric in metrics}


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value: zero, or the lowest if that is less, is empty, the highest full."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


class Trend:
    """The first column of the last steps, and the last step's others."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=TREND)
        self._last: Mapping[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take in a step's metrics."""
        columns = columns_of(metrics)
        if columns and math.isfinite(value := metrics.get(columns[0].metric, math.nan)):
            self.values.append(value)
        self._last = metrics

    def __str__(self) -> str:
        """``success 12.5% ▁▂▃, 4.1 s a step (rollout 3.0 s, update 0.9 s), return 0.55``; empty before a step."""
        columns = columns_of(self._last)
        if not columns:
            return ""
        times = [column for column in columns if column in _COMMON[:_TIMES]]
        parts = [f"{column.heading} {column.cell(self._last)}" for column in columns if column not in _COMMON]
        if parts:
            parts[0] += f" {sparkline(tuple(self.values))}"
        if times:
            split = ", ".join(f"{column.heading} {column.cell(self._last)}" for column in times[1:])
            parts.insert(1, f"{times[0].cell(self._last)} a step" + (f" ({split})" if split else ""))
        return ", ".join(parts)
