"""Seeds, recipes, intervals and heat maps, by numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.stats import t as student

from embodied_rl.report.curves import curve, groups, heat_map, t_quantile, thinned
from embodied_rl.report.data import read_run
from tests.report.runs import ROWS, make_run


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 200])
def test_quantiles_are_students(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-5)


def seeds(tmp_path: Path, rates: list[float]) -> list[Path]:
    return [
        make_run(
            tmp_path / f"seed{seed}", rows=[ROWS[0], ROWS[1] | {"env/success_once": rate}], changes={"actor.seed": seed}
        )
        for seed, rate in enumerate(rates)
    ]


def test_runs_that_differ_in_seeds_are_one_curve(tmp_path: Path) -> None:
    [group] = groups([read_run(path) for path in seeds(tmp_path, [0.2, 0.3, 0.4])])
    assert len(group.runs) == 3 and group.name == "by_hand"
    found = curve(group, "env/success_once", "steps")
    assert found and found.low and found.high
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.mean.x == (1.0,) and found.mean.y == (pytest.approx(0.3),)
    assert found.low[0] == pytest.approx(0.3 - half, abs=1e-5) and found.high[0] == pytest.approx(0.3 + half, abs=1e-5)
    assert [line.y for line in found.singles] == [(0.2,), (0.3,), (0.4,)]


def test_what_is_never_negative_has_no_interval_below_zero(tmp_path: Path) -> None:
    [group] = groups([read_run(path) for path in seeds(tmp_path, [0.0, 0.5])])
    found = curve(group, "env/success_once", "steps")
    assert found and found.low == (0.0,)


def test_other_settings_make_another_curve_named_by_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{rate}", changes={"actor.optim.lr": rate}) for rate in (0.001, 0.01)]
    assert [group.name for group in groups([read_run(path) for path in runs])] == [
        "actor.optim.lr=0.001",
        "actor.optim.lr=0.01",
    ]


def test_curves_over_other_axes(tmp_path: Path) -> None:
    [group] = groups([read_run(make_run(tmp_path / "run"))])
    by_time, by_env = curve(group, "eval/success_rate", "seconds"), curve(group, "eval/success_rate", "env steps")
    assert by_time and by_time.mean.x == (2.0, 43.0) and by_time.low is None
    assert by_env and by_env.mean.x == (0.0, 350.0)
    assert curve(group, "no/such_metric", "steps") is None


def test_long_curves_are_means_of_neighbours() -> None:
    line = thinned(range(1000), [float(x) for x in range(1000)], most=250)
    assert len(line.x) == 250 and line.x[:2] == (1.5, 5.5) and line.y == line.x
    assert thinned([1, 2], [3, 4]).y == (3, 4)


def test_heat_map_by_hand(tmp_path: Path) -> None:
    [group] = groups([read_run(make_run(tmp_path / "run"))])
    found = heat_map(group, "eval_task/")
    assert found and found.steps == ((0, 0), (4, 4))
    assert found.rows == (("00_left", (0.5, 1.0)), ("01_right", (0.0, 0.75)))
    assert heat_map(group, "env_task/") is None


def test_heat_map_of_a_long_run_has_few_columns(tmp_path: Path) -> None:
    rows = [{"step": n, "env_task/a/success": n / 100, "env_task/b/success": 1.0} for n in range(1, 101)]
    del rows[0]["env_task/b/success"], rows[1]["env_task/b/success"]
    [group] = groups([read_run(make_run(tmp_path / "run", rows=rows))])
    found = heat_map(group, "env_task/", most=50)
    assert found and len(found.steps) == 50 and found.steps[0] == (1, 2)
    assert found.rows[0][1][0] == pytest.approx(0.015)
    assert found.rows[1][1][:2] == (None, 1.0)
