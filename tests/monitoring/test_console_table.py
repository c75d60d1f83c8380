from __future__ import annotations

import errno
import io
import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from embodied_rl.errors import UserError
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.console import (
    ConsoleBackend,
    RunConsole,
    VerboseBackend,
    format_number,
    metrics_panel,
)
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.trend import sparkline

METRICS = {
    "time/step": 81.3,
    "env/success_once": 0.4375,
    "env/return": math.nan,
    "actor/policy_loss": -0.00234,
    "actor/update/lr": 2e-5,
    "env_steps": 1_234_567,
}


def on(output: io.StringIO, *, width: int) -> RunInfo:
    console = Console(file=output, width=width)
    return RunInfo(run_dir=Path(), project_name="p", experiment_name="e", config={}, console=console)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-3.0, "-3"),
        (1234567, "1,234,567"),
        (0.4375, "0.4375"),
        (1 / 300, "0.003333"),
        (173.25, "173.2"),
        (999.96, "1000"),
        (12345.678, "12,345.7"),
        (2e-5, "2.000e-05"),
        (-1e12, "-1.000e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def render(width: int, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(metrics_panel(7, METRICS, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_panel_fits_and_shows_every_metric(width: int) -> None:
    text = render(width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("step 7", "81.30", "0.4375", "nan", "-0.002340", "2.000e-05", "1,234,567", "update/lr"):
        assert part in text


def test_groups_stand_side_by_side_where_there_is_room() -> None:
    assert len(render(120).splitlines()) < len(render(40).splitlines())
    headings = [line for line in render(120).splitlines() if "actor" in line]
    assert "env" in headings[0], "two groups begin in the same line"


def test_a_value_that_is_not_finite_is_highlighted() -> None:
    assert "\x1b[1;37;41m       nan" in render(80, colour=True)


def test_metrics_of_single_tasks_are_left_to_the_table_and_the_files() -> None:
    output = io.StringIO()
    backend = VerboseBackend(on(output, width=80))
    backend.log(1, {"eval_task/00_open/success": 0.5})
    assert output.getvalue() == ""
    backend.log(1, {"env_task/00_open/success": 0.5, "env/return": 1.0})
    assert "return" in output.getvalue() and "open" not in output.getvalue()


STEP = {
    "env/episodes": 64.0,
    "env/success_once": 0.25,
    "env/return": 0.5,
    "env/episode_len": 31.5,
    "time/step": 12.3,
    "time/rollout": 9.1,
    "time/update": 0.02,
    "actor/approx_kl": 2e-4,
    "actor/entropy": 1.2,
    "actor/grad_norm": 0.3,
}


def rows(width: int, *steps: dict[str, float]) -> list[str]:
    output = io.StringIO()
    backend = ConsoleBackend(on(output, width=width))
    for number, metrics in enumerate(steps, 1):
        backend.log(number, metrics)
    return output.getvalue().splitlines()


def test_a_step_is_a_row() -> None:
    heading, first, second = rows(120, STEP, STEP | {"env/success_once": 0.5, "env/return": -1234.5})
    names = ["step", "success", "return", "steps", "s/step", "rollout", "update", "KL", "entropy", "gradient", "trend"]
    assert heading.split() == names
    assert first.split("  ")[0].strip() == "" and first.split()[:4] == ["1", "25.0%", "0.5", "31.5"]
    assert first.split()[4:] == ["12.3", "s", "9.1", "s", "20", "ms", "2.0e-04", "1.2", "0.3", "█"]
    assert second.split()[:3] == ["2", "50.0%", "-1234"] and second.endswith("▅█")


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_rows_fit_the_terminal(width: int) -> None:
    lines = rows(width, *[STEP | {"env/return": -12345.6}] * 30)
    assert len(lines) == 31 and max(map(len, lines)) <= width
    assert lines[0].split()[1] == "success", "kept in the narrowest"


def test_columns_stand_below_their_headings() -> None:
    heading, row = rows(120, STEP)
    for name, value in (("success", "25.0%"), ("s/step", "12.3 s"), ("gradient", "0.3 ")):
        assert heading.index(name) + len(name) == row.index(value) + len(value.rstrip())


def test_a_step_without_a_finished_episode() -> None:
    """With auto-reset the first steps may have none."""
    nothing = {name: value for name, value in STEP.items() if name == "env/episodes" or not name.startswith("env/")}
    _, first, second = rows(120, nothing, STEP)
    assert first.split()[:4] == ["1", "-", "-", "-"] and second.endswith("  █")


def test_the_heading_comes_again_after_an_evaluation() -> None:
    lines = rows(80, STEP, STEP, {"eval/success_rate": 0.5}, STEP)
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "step", "4"]


def test_a_value_that_is_not_finite_is_named() -> None:
    _, row = rows(80, STEP | {"actor/grad_norm": math.nan, "actor/policy_loss": math.inf})
    assert row.endswith("not finite: actor/grad_norm, actor/policy_loss")


def test_answers_and_imitation_have_their_own_columns() -> None:
    math_step = {"rollout/accuracy": 0.5, "rollout/score": 0.4, "rollout/length": 17.0, "time/step": 1.0}
    assert rows(120, math_step)[0].split()[:4] == ["step", "accuracy", "score", "tokens"]
    assert rows(120, {"actor/policy_loss": 2.5, "time/step": 1.0})[0].split()[:3] == ["step", "loss", "s/step"]


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([]) == "" and sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([-1.0, 1.0]) == "▁█"


def test_the_log_has_what_was_printed_from_the_beginning(tmp_path: Path) -> None:
    out = io.StringIO()
    console = RunConsole(file=out, width=40)
    console.print("before there was a directory")
    path = tmp_path / "run.log"
    path.write_text("of the run that is resumed\n")
    with suppress(UserError), console.logging_to(path):
        console.print("[bold]a row[/bold]")
        logger = MetricLogger(["console"], replace(on(out, width=40), console=console))
        logger.log(1, {"time/step": 2.0, "actor/entropy": 0.25})
        raise UserError("no room for [3] envs")
    text = path.read_text()
    assert text.startswith("of the run that is resumed\nbefore there was a directory\na row\n")
    assert "entropy" in text and "0.25" in text, "all metrics, though a narrow console has no column for them"
    assert text.endswith("error: no room for [3] envs\n")
    assert "entropy" not in out.getvalue() and "a row" in out.getvalue() and "no room" not in out.getvalue()


def test_verbose_panels_are_logged_once(tmp_path: Path) -> None:
    console = RunConsole(file=io.StringIO(), width=80)
    with console.logging_to(tmp_path / "run.log"):
        run = replace(on(io.StringIO(), width=80), console=console)
        MetricLogger(["verbose"], run).log(1, {"time/step": 2.0})
    assert (tmp_path / "run.log").read_text().count("step 1") == 1


class Closed(io.StringIO):
    """What a terminal is whose other side has gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_closed_terminal_fails_nothing_but_the_log_goes_on(tmp_path: Path) -> None:
    """SIGHUP, which ends a run with a checkpoint, comes a moment later."""
    console = RunConsole(file=Closed(), force_terminal=True)
    with console.logging_to(tmp_path / "run.log"):
        console.print("step 1")
        with console.status("step 2"):
            console.print("step 3")
    assert (tmp_path / "run.log").read_text().split("\n")[:2] == ["step 1", "step 3"]
    with pytest.raises(OSError, match="Input/output error"):
        RunConsole(file=Closed(), force_terminal=False).print("a file on a damaged disk")


def test_a_real_terminal_that_closes(tmp_path: Path) -> None:
    """It is none any more then."""
    ours, theirs = os.openpty()
    terminal = os.fdopen(theirs, "w", buffering=1)
    console = RunConsole(file=terminal)
    with console.logging_to(tmp_path / "run.log"), console.status("step 1"):
        os.close(ours)
        assert not terminal.isatty()
        console.print("step 2")
    assert "step 2" in (tmp_path / "run.log").read_text()
    with suppress(OSError):  # it cannot write what it still has
        terminal.close()
