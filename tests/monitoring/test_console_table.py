from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.monitoring.builtin import ConsoleBackend, format_number, metrics_panel

METRICS = {
    "time/step": 81.3,
    "env/success_once": 0.4375,
    "env/return": math.nan,
    "actor/policy_loss": -0.00234,
    "actor/update/lr": 2e-5,
    "env_steps": 1_234_567,
}


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
    run = RunInfo(
        run_dir=Path(),
        project_name="p",
        experiment_name="e",
        config={},
        first_step=0,
        wandb_options={},
        console=Console(file=output, width=80),
    )
    backend = ConsoleBackend(run)
    backend.log(1, {"eval_task/00_open/success": 0.5})
    assert output.getvalue() == ""
    backend.log(1, {"env_task/00_open/success": 0.5, "env/return": 1.0})
    assert "return" in output.getvalue() and "open" not in output.getvalue()
