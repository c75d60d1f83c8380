"""A success table for people (console) and for programs (eval.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from embodied_rl.contracts import EvaluatedEpisode
from embodied_rl.evaluation.eval_file import EPISODES, SCHEMA_VERSION, number_or_null
from embodied_rl.evaluation.success import SuccessRow, SuccessTable
from embodied_rl.files import write_json

_CHART_CELLS = 21
_CHART_MIN_WIDTH = 120
_DETAILS_MIN_WIDTH = 100


class SuccessReport:
    """Rich renderable: ``console.print(SuccessReport(table, title="libero_spatial"))``.

    Instructions wrap, so nothing that tells two tasks apart is cut off. A narrow console (under 100 columns) leaves out
    the return and the length of successful episodes; a wide one (from 120) draws each interval on a scale to 100 %.
    """

    def __init__(self, table: SuccessTable, *, title: str = "evaluation") -> None:
        self.table, self.title = table, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tasks = self.table.tasks
        grid = Table(title=self.title, title_style="bold", box=box.SIMPLE_HEAD, show_footer=True)
        grid.pad_edge, grid.collapse_padding = False, True
        footer = Text(f"{len(tasks)} task{'' if len(tasks) == 1 else 's'} (mean {self.table.mean_task_success:.1%})")
        grid.add_column("task", Text("all"), justify="right")
        grid.add_column("instruction", footer, ratio=1)
        rows = [_cells(row, options.max_width) for row in tasks]
        for name, total in _cells(self.table.overall, options.max_width).items():
            grid.add_column(name, total, justify="left" if name == _CHART_AXIS else "right", no_wrap=True)
        for row, cells in zip(tasks, rows, strict=True):
            grid.add_row(str(row.task_id), Text(row.instruction), *cells.values())
        yield grid


_CHART_AXIS = "0 %".ljust(_CHART_CELLS - 5) + "100 %"


def _cells(row: SuccessRow, width: int) -> dict[str, Text]:
    """Column name -> cell, for a console of ``width`` columns."""
    low, high = row.interval
    cells = {
        "success": Text(f"{row.successes}/{row.episodes}"),
        "rate": Text(f"{row.success_rate:.1%}", style="bold"),
        "95 % interval": Text(f"{100 * low:.1f} - {100 * high:.1f}"),
        "steps": Text(f"{row.mean_length:.0f}"),
    }
    if width >= _DETAILS_MIN_WIDTH:
        to_success = "-" if row.mean_success_length is None else f"{row.mean_success_length:.0f}"
        cells |= {"to success": Text(to_success), "return": Text(f"{row.mean_return:.2f}")}
    if width >= _CHART_MIN_WIDTH:
        cells[_CHART_AXIS] = _interval_chart(row)
    return cells


def _interval_chart(row: SuccessRow) -> Text:
    """The interval as a line and the rate as a dot, on a scale from 0 to 1."""
    shares = (row.interval[0], row.success_rate, row.interval[1])
    low, dot, high = (round(share * (_CHART_CELLS - 1)) for share in shares)
    text = Text("".join("─" if low <= cell <= high else " " for cell in range(_CHART_CELLS)), style="cyan")
    return Text.assemble(text[:dot], ("●", "bold cyan"), text[dot + 1 :])


def eval_report(
    table: SuccessTable,
    episodes: Sequence[EvaluatedEpisode],
    *,
    meta: Mapping[str, Any],
    seed: int | None = None,
    eval_s: float | None = None,
    video_paths: Sequence[Path] = (),
) -> dict[str, Any]:
    """The content of eval.json. Everything but ``timing`` is the same for the same results.

    ``pc_`` values are percentages, lengths are simulator steps, ``timing`` is wall time in seconds. The names of the
    overall values follow LeRobot's ``eval_info.json``.
    """
    overall = table.overall
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": EPISODES,
        "meta": dict(meta),
        "overall": {
            **_numbers(overall),
            "mean_task_pc_success": round(100 * table.mean_task_success, 4),
            "n_tasks": len(table.tasks),
            "video_paths": [Path(path).as_posix() for path in video_paths],
        },
        "per_task": [{"task_id": row.task_id, "instruction": row.instruction, **_numbers(row)} for row in table.tasks],
        "episodes": [_episode(episode, seed) for episode in sorted(episodes, key=_place)],
    }
    if eval_s is not None:
        report["timing"] = {"eval_s": round(eval_s, 3), "eval_ep_s": round(eval_s / overall.episodes, 3)}
    return report


def write_eval_json(
    path: Path,
    table: SuccessTable,
    episodes: Sequence[EvaluatedEpisode],
    *,
    meta: Mapping[str, Any],
    seed: int | None = None,
    eval_s: float | None = None,
    video_paths: Sequence[Path] = (),
) -> None:
    """Write :func:`eval_report` to ``path`` in one atomic step.

    Args:
        episodes: those of the table, in any order; their videos relative to where videos are kept.
        meta: what was evaluated, and under what: ``conditions.py``, checkpoint, policy version. JSON types only.
        seed: what the initial states are functions of, beside their number; None where the number is enough.
        eval_s: wall seconds of the evaluation; None leaves the timing section out.

    Raises:
        TypeError, ValueError: ``meta`` holds something that JSON has no word for.
    """
    write_json(path, eval_report(table, episodes, meta=meta, seed=seed, eval_s=eval_s, video_paths=video_paths))


def _place(episode: EvaluatedEpisode) -> tuple[int, int]:
    return episode.task_id, episode.reset_state_id


def _episode(episode: EvaluatedEpisode, seed: int | None) -> dict[str, Any]:
    video = None
    if episode.video is not None:
        video = {"file": episode.video.as_posix(), "tile": episode.tile}
    return {
        "task_id": episode.task_id,
        "instruction": episode.instruction,
        "init_state": episode.init_state,
        "reset_state_id": episode.reset_state_id,
        "seed": seed,
        "success": episode.success,
        "return": number_or_null(episode.episode_return),
        "max_reward": number_or_null(episode.max_reward),
        "length": episode.episode_length,
        "policy_version": episode.policy_version,
        "video": video,
    }


def _numbers(row: SuccessRow) -> dict[str, Any]:
    return {
        "pc_success": round(100 * row.success_rate, 4),
        "pc_success_ci95": [round(100 * end, 4) for end in row.interval],
        "n_episodes": row.episodes,
        "n_successes": row.successes,
        # A simulator's NaN reward must not cost the report of a long evaluation.
        "avg_sum_reward": number_or_null(row.mean_return),
        "avg_episode_length": round(row.mean_length, 4),
        "avg_success_length": None if row.mean_success_length is None else round(row.mean_success_length, 4),
    }
