"""The metric backends that come with the project."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from embodied_rl.errors import UserError, listed, suggestion
from embodied_rl.extras import install_command
from embodied_rl.files import atomic
from embodied_rl.monitoring.backend import RunInfo

METRICS_FILE: Final = "metrics.jsonl"
_COLUMN_WIDTH: Final = 38
_VALUE_WIDTH: Final = 10
_NO_PREFIX: Final = "run"
"""Heading of metrics without a prefix."""
_TASKS: Final = ("eval_task/", "env_task/")
"""Prefixes with as many rows as there are tasks; an evaluation's table has them."""
_RUN_ID_FILE: Final = "wandb_run_id.txt"
_WANDB_OWNED: Final = {
    "project": "logger.project_name",
    "name": "runner.experiment_name",
    "dir": "runner.output_dir",
    "config": "the run's own config",
}
"""Option of ``wandb.init`` -> where it comes from."""


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    metric: str
    show: Callable[[float], str]
    width: int = 8


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _short(value: float) -> str:
    """At most seven characters."""
    size = abs(value)
    return f"{value:.1e}" if size >= 1e5 or 0 < size < 1e-3 else f"{value:.3g}" if size < 1e3 else f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


_GOALS: Final[Mapping[str, Sequence[_Column]]] = {
    "env/episodes": (
        _Column("success", "env/success_once", _percent),
        _Column("return", "env/return", _short),
        _Column("steps", "env/episode_len", _short, 6),
    ),
    "rollout/accuracy": (
        _Column("accuracy", "rollout/accuracy", _percent),
        _Column("score", "rollout/score", _short),
        _Column("tokens", "rollout/length", _short, 7),
    ),
    "actor/policy_loss": (_Column("loss", "actor/policy_loss", _short),),
}
"""Metric that a task logs in each step -> columns of what it is about; the first is the one whose trend is drawn."""
_COMMON: Final = (
    _Column("s/step", "time/step", _seconds),
    _Column("rollout", "time/rollout", _seconds),
    _Column("update", "time/update", _seconds),
    _Column("KL", "actor/approx_kl", _short),
    _Column("entropy", "actor/entropy", _short),
    _Column("gradient", "actor/grad_norm", _short, 9),
)
"""Columns of every task, in the order in which a narrow terminal keeps them."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_TREND: Final = 16
"""Steps that the trend shows."""


class ConsoleBackend:
    """Metrics on the console: a row a step, with what matters of it and the trend of success over the last steps.

    Columns that do not fit are left out, ``metrics.jsonl`` has them all. A metric that is not finite is named.
    """

    def __init__(self, run: RunInfo) -> None:
        self._console = run.console
        self._columns: list[_Column] = []
        self._goal: list[float] = []
        self._interrupted = False
        """Something else was printed under the heading."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step" not in metrics:  # of an evaluation, which prints a table of its own
            self._interrupted = True
            return
        if not self._columns or self._interrupted:
            self._columns = self._fitting(metrics)
            heading = [f"{'step':>6}", *(f"{column.heading:>{column.width}}" for column in self._columns), "  trend"]
            self._console.print(Text("  ".join(heading).rstrip(), style="bold cyan"), soft_wrap=True)
            self._interrupted = False
        if (value := metrics.get(self._columns[0].metric)) is not None and math.isfinite(value):
            self._goal.append(value)
        cells = [f"{step:>6}", *(self._cell(column, metrics) for column in self._columns)]
        row = Text("  ".join([*cells, f"  {sparkline(self._goal[-_TREND:])}"]).rstrip())
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            row.append(f"  not finite: {listed(wrong, 3)}", style="bold white on red")
        self._console.print(row, soft_wrap=True)

    def _fitting(self, metrics: Mapping[str, float]) -> list[_Column]:
        goal = next((columns for metric, columns in _GOALS.items() if metric in metrics), ())
        wanted = [*goal, *(column for column in _COMMON if column.metric in metrics)]
        chosen, width = [], 6 + 4 + _TREND
        for column in wanted:
            width += column.width + 2
            if width > self._console.width:
                break
            chosen.append(column)
        return chosen or wanted[:1]

    @staticmethod
    def _cell(column: _Column, metrics: Mapping[str, float]) -> str:
        value = metrics.get(column.metric)
        text = "-" if value is None else column.show(value) if math.isfinite(value) else str(value)
        return f"{text:>{column.width}}"

    def close(self) -> None:
        pass


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value: zero, or the lowest if that is less, is empty, the highest full."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


class VerboseBackend:
    """Metrics on the console: one panel a step with all of them, grouped by prefix, in as many columns as fit."""

    def __init__(self, run: RunInfo) -> None:
        self._console = run.console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if not name.startswith(_TASKS)}
        if shown:
            self._console.print(metrics_panel(step, shown, self._console.width))

    def close(self) -> None:
        pass


def metrics_panel(step: int, metrics: Mapping[str, float], width: int) -> Panel:
    """Groups (the part of a name before its first ``/``) in alphabetical order, balanced over the columns."""
    groups: dict[str, dict[str, float]] = {}
    for name in sorted(metrics):
        prefix, _, rest = name.partition("/")
        groups.setdefault(prefix if rest else _NO_PREFIX, {})[rest or name] = metrics[name]
    count = max(min((width - 4) // _COLUMN_WIDTH, len(groups)), 1)
    columns: list[list[Table]] = [[] for _ in range(count)]
    heights = [0] * count
    for prefix, values in groups.items():
        shortest = heights.index(min(heights))
        columns[shortest].append(_group_table(prefix, values))
        heights[shortest] += len(values) + 2
    layout = Table.grid(padding=(0, 2), expand=True)
    for _ in columns:
        layout.add_column(ratio=1)
    layout.add_row(*(Group(*tables) for tables in columns))
    return Panel(
        layout, title=Text(f"step {step}", style="bold"), title_align="left", box=box.ROUNDED, border_style="dim"
    )


def _group_table(prefix: str, values: Mapping[str, float]) -> Table:
    table = Table(box=None, expand=True, padding=0, header_style="bold cyan")
    table.add_column(prefix, ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("", justify="right", no_wrap=True, min_width=_VALUE_WIDTH)
    for name, value in values.items():
        style = "" if math.isfinite(value) else "bold white on red"
        table.add_row(Text(f" {name}"), Text(format_number(value), style=style))
    return table


def format_number(value: float) -> str:
    """Whole numbers in full, others with four significant digits, very large and small ones with an exponent."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size < 1e-3 or size >= 1e9:
        return f"{value:.3e}"
    if size >= 1000:
        return f"{value:,.1f}"
    return f"{value:#.4g}".rstrip(".")


class JsonlBackend:
    """Metrics as ``metrics.jsonl``: one JSON object a step, readable with ``pandas.read_json(path, lines=True)``.

    Every call reaches the file at once. A further call for the same step rewrites that step's line with both.

    A value that is not finite is written as null, as JSON has no NaN.
    """

    def __init__(self, run: RunInfo) -> None:
        path = run.run_dir / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _drop_steps_from(path, run.first_step)
        self._file = path.open("a+b")
        self._line: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._line_start = sum(len(line) for line in kept[:-1])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._line.get("step"):
            self._file.truncate(self._line_start)
        else:
            self._line, self._line_start = {"step": step}, self._file.seek(0, 2)
        self._line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(self._line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def logged_before(run_dir: Path, metric: str, step: int) -> float | None:
    """The value of ``metric`` at ``step`` in the run's file; None without one."""
    path = run_dir / METRICS_FILE
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}") and (values := json.loads(line)).get("step") == step:
                return values.get(metric)
    return None


def _drop_steps_from(path: Path, first_step: int) -> list[bytes]:
    """Keep and return the lines of earlier steps; drop a last line that a killed process left incomplete."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: expected a JSON object with a 'step'; got {line[:80]!r}. Repair or move the file."
            ) from error
        if step < first_step:
            kept.append(line)
    if kept != lines:
        with atomic(path) as scratch:
            scratch.write_bytes(b"".join(kept))
    return kept


class TensorboardBackend:
    """Metrics as TensorBoard events in ``<run dir>/tensorboard``."""

    def __init__(self, run: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the logger backend 'tensorboard' needs a package that is not installed: pip install tensorboard"
            ) from error
        # TensorBoard hides what earlier event files hold for these steps.
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbBackend:
    """Metrics and videos in Weights & Biases: ``wandb.init`` with the options of ``logger.wandb``. A resumed run
    continues its own W&B run."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"the logger backend 'wandb' needs a package that is not installed: {install_command('wandb')}"
            ) from error
        options: dict[str, Any] = dict(run.wandb_options)
        _check_wandb_options(options, set(inspect.signature(wandb.init).parameters) - set(_WANDB_OWNED))
        run.run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run.run_dir / _RUN_ID_FILE
        if run.first_step > 0 and id_file.exists():
            options = {"id": id_file.read_text().strip(), "resume": "allow"} | options
        self._video = wandb.Video
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            dir=str(run.run_dir),
            config=dict(run.config),
            **options,
        )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._video(str(path), format="mp4")}, step=step)

    def close(self) -> None:
        self._run.finish()


def _check_wandb_options(options: Mapping[str, object], known: set[str]) -> None:
    settings = options.get("settings")
    nested = list(settings) if isinstance(settings, Mapping) else []
    for name in (*options, *nested):
        if name in {"key", "api_key"}:
            raise UserError(
                f"logger.wandb: got {name!r}, but configs are stored and shared, so no key belongs in one. "
                "Run `wandb login` or set WANDB_API_KEY."
            )
    for name in options:
        if name in _WANDB_OWNED:
            raise UserError(f"logger.wandb.{name}: it follows from {_WANDB_OWNED[name]}; set that and remove this one")
        if name not in known:
            raise UserError(f"logger.wandb.{name}: wandb.init has no such option.{suggestion(name, known)}")
