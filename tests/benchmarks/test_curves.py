"""Learning curves: what is read from runs, the interval, the pass line, files."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import curves, figures
from benchmarks.curves import RECIPES, Line, parse, report, trained
from benchmarks.learning_curve import Curve, Point, draw, points, reached, read_curve, write_csv

LINES: Sequence[Mapping[str, Any]] = (
    {"step": 0, "eval/accuracy": 0.4, "eval/seconds": 1.0},
    {"step": 1, "time/step": 10.0},
    {"step": 2, "time/step": 10.0, "eval/accuracy": 0.6, "eval/seconds": 2.0},
    {"step": 3, "time/step": 10.0, "eval/accuracy": None, "eval/seconds": 2.0},
    {"step": 4, "time/step": 10.0, "eval/accuracy": 0.8, "eval/seconds": 2.0},
)


def write_run(run: Path, lines: Sequence[Mapping[str, Any]] = LINES) -> Path:
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def curve(name: str, values: Sequence[float], steps: Sequence[int] = (0, 2, 4)) -> Curve:
    return Curve(
        name=name, metric="eval/accuracy", steps=list(steps), values=list(values), seconds=[60.0 * s for s in steps]
    )


THREE = (curve("seed 0", (0.40, 0.6, 0.8)), curve("seed 1", (0.42, 0.6, 0.9)), curve("seed 2", (0.44, 0.6, 0.7)))


def test_wall_time_is_training_evaluations_and_what_came_before(tmp_path: Path) -> None:
    found = read_curve(write_run(tmp_path / "run"), name="a", before=100.0)
    assert (found.metric, found.steps, found.values) == ("eval/accuracy", [0, 2, 4], [0.4, 0.6, 0.8])
    # 100 + 1; + 10 + 10 + 2; + 10 + 2 + 10 + 2: an evaluation that was not finite took its time, too.
    assert found.seconds == pytest.approx([101.0, 123.0, 147.0])


def test_a_run_without_metrics_or_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds no metrics\.jsonl"):
        read_curve(tmp_path, name="a")
    with pytest.raises(SystemExit, match="no evaluation"):
        read_curve(write_run(tmp_path / "run", [{"step": 1, "time/step": 1.0}]), name="a")


def test_interval_is_students_t() -> None:
    # Mean 0.8, std 0.1, three seeds: 0.8 ± 4.302653 * 0.1 / sqrt(3).
    point = Point(step=1, seconds=1.0, values=(0.75, 0.65, 0.7))
    low, high = point.interval or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.7 - 0.124207, 0.7 + 0.124207), abs=1e-5)
    assert Point(step=1, seconds=1.0, values=(0.5,)).interval is None
    assert Point(step=1, seconds=1.0, values=(0.0, 1.0)).interval == (0.0, 1.0)


def test_only_steps_of_every_seed_are_averaged() -> None:
    found = points((curve("a", (0.1, 0.2, 0.3)), curve("b", (0.3, 0.5), steps=(0, 4))))
    assert [point.step for point in found] == [0, 4]
    assert [point.mean for point in found] == pytest.approx([0.2, 0.4])
    with pytest.raises(SystemExit, match="no training step in common"):
        points((curve("a", (0.1,), steps=(1,)), curve("b", (0.1,), steps=(2,))))


def test_reached_is_the_first_evaluation_at_the_goal() -> None:
    assert reached(THREE[0], 0.6) == (2, 120.0)
    assert reached(THREE[0], 0.81) is None


@pytest.mark.parametrize(
    ("goal", "minutes", "missed"),
    [(0.6, 2.0, []), (0.6, 1.9, ["seed 0", "seed 1", "seed 2"]), (0.75, 5.0, ["seed 2"])],
)
def test_every_seed_has_to_reach_the_goal_in_time(goal: float, minutes: float, missed: list[str]) -> None:
    _, found = report(THREE, Line(goal=goal, minutes=minutes))
    assert [text.partition(":")[0] for text in found] == missed


@pytest.mark.parametrize(
    ("after", "episodes", "minutes", "reached"),
    [
        (0.7, 100, 4.0, True),  # 40.4 to 59.6 % before, 60.4 to 78.1 % after
        (0.69, 100, 4.0, False),  # 59.4 %: the intervals meet
        (0.64, 1000, 4.0, False),  # apart, but 14 points
        (0.65, 1000, 4.0, True),
        (0.7, 100, 3.9, False),
    ],
)
def test_a_gain_is_enough_in_time_and_beyond_chance(after: float, episodes: int, minutes: float, reached: bool) -> None:
    seed = replace(curve("seed 0", (0.5, 0.9, after)), episodes=[episodes] * 3)
    table, missed = report([seed], Line(gain=0.15, minutes=minutes))
    assert bool(missed) == (not reached)
    if episodes == 100 and after == 0.7:
        assert list(table.columns[1].cells) == ["50.0 (40.4–59.6)"]


def test_episodes_are_read_where_they_are_known(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/success_rate": 0.5, "eval/episodes": 8.0, "eval/seconds": 1.0}]
    assert read_curve(write_run(tmp_path / "simulator", lines), name="a").episodes == [8]
    assert read_curve(write_run(tmp_path / "sums"), name="a").episodes is None


def test_csv_has_a_row_for_each_step(tmp_path: Path) -> None:
    write_csv(tmp_path / "curve.csv", THREE)
    rows = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert [row["step"] for row in rows] == ["0", "2", "4"]
    assert float(rows[2]["mean"]) == pytest.approx(0.8)
    assert float(rows[2]["ci95_low"]) == pytest.approx(0.8 - 0.248414, abs=1e-5)
    assert float(rows[2]["ci95_high"]) == 1.0
    assert (rows[2]["seed 0"], rows[2]["seed 2"]) == ("0.8", "0.7")
    write_csv(tmp_path / "one.csv", THREE[:1])
    assert next(csv.DictReader((tmp_path / "one.csv").open()))["ci95_low"] == ""


@pytest.mark.parametrize("count", [1, 3])
def test_png_is_drawn(tmp_path: Path, count: int) -> None:
    draw(tmp_path / "curve.png", THREE[:count], title="t", goal=0.75, minutes=5)
    with Image.open(tmp_path / "curve.png") as image:
        assert image.width > 1000


def test_start_up_counts_before_the_first_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path / "arithmetic_sft" / "2026-01-01_00-00-00", [{"step": 1, "time/step": 1.0}])
    write_run(tmp_path / "arithmetic_grpo" / "2026-01-01_00-02-00")
    (tmp_path / "times.json").write_text(json.dumps({"command_seconds": [90.0, 60.0]}))
    found = trained(tmp_path, 3)
    assert found.name == "seed 3"
    # The run itself knows of 47 of the 150 seconds.
    assert found.seconds == pytest.approx([104.0, 126.0, 150.0])


def test_an_unfinished_seed_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "push_cube_ppo" / "2026-01-01_00-00-00")
    with pytest.raises(SystemExit, match="no finished run of seed 1"):
        trained(tmp_path, 1)


def test_further_overrides_and_wrong_words() -> None:
    options, extra = parse(["libero_spatial", "--seeds", "4", "env.task_ids=[0]"])
    assert (options.seeds, extra) == ([4], ["env.task_ids=[0]"])
    for wrong in (
        ["math", "--seeds", "0,x"],
        ["math", "--nope"],
        ["math", "word"],
        ["runs"],
        ["runs", "a", "--plot-only"],
        ["compare"],
    ):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_every_command_is_a_valid_configuration(tmp_path: Path) -> None:
    from embodied_rl.cli import config_of
    from embodied_rl.schema import CollectConfig

    for recipe in RECIPES.values():
        for command, quick in zip(recipe.commands, recipe.quick, strict=True):
            words = [word.format(seed=1, folder=tmp_path) for word in command]
            config = config_of(*words, *quick)
            collects = isinstance(config, CollectConfig)
            assert (config.collect.seed if collects else config.actor.seed) == 1
            assert config.runner.output_dir == str(tmp_path)


def test_runs_are_drawn_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    curves.main(["runs", *runs, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "curve.png").exists() and (tmp_path / "out" / "curve.csv").exists()
    assert "80.0" in capsys.readouterr().out


def test_recipes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ppo", "grpo"):
        for seed in (0, 1):
            write_run(tmp_path / name / f"seed_{seed}" / "experiment" / "2026-01-01_00-00-00")
            (tmp_path / name / f"seed_{seed}" / "times.json").write_text('{"command_seconds": [60.0]}')
    curves.main(["compare", str(tmp_path / "ppo"), str(tmp_path / "grpo"), "--output", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"curve.png", "ppo.csv", "grpo.csv"}
    assert "grpo: held-out accuracy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"holds no seed_<number> folder"):
        curves.main(["compare", str(tmp_path), "--output", str(tmp_path / "out")])


def written(folder: Path, seed: int, after: float) -> None:
    lines = [
        {"step": 0, "eval/success_rate": 0.1, "eval/episodes": 50.0, "eval/seconds": 10.0},
        {"step": 2, "time/step": 100.0, "eval/success_rate": after, "eval/episodes": 50.0, "eval/seconds": 10.0},
    ]
    write_run(folder / f"seed_{seed}" / "run" / "2026-01-01_00-00-00", lines)
    times = {"command_seconds": [60.0, 120.0], "cpu_seconds": [100.0, 200.0]}
    (folder / f"seed_{seed}" / "times.json").write_text(json.dumps(times))


@pytest.mark.parametrize(("after", "passed"), [(0.92, True), (0.88, False)])
def test_what_was_reached_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, passed: bool
) -> None:
    monkeypatch.setattr(figures, "RECORD", tmp_path / "figures.json")
    for seed, share in ((0, 0.94), (7, after)):
        written(tmp_path / "out", seed, share)
    name = "libero_spatial_new"
    command = [name, "--seeds", "0,7", "--plot-only", "--record", "--output", str(tmp_path / "out")]
    if passed:
        curves.main(command)
    else:
        with pytest.raises(SystemExit, match="missed: libero_spatial_new, seed 7: 90 % within 45 minutes"):
            curves.main(command)
    figure = figures.read()[name]
    assert figure.passed == passed
    assert [(seed.seed, seed.before, seed.after, seed.episodes, seed.wall_s, seed.cpu_s) for seed in figure.seeds] == [
        (0, 0.1, 0.94, 50, 180, 300),
        (7, 0.1, after, 50, 180, 300),
    ]
    line = figures.row(name, "libero_training.md", "a title", "90 %", figure)
    assert (
        f"| {'reached' if passed else '**missed**'} | 0, 7 | 10.0, 10.0 → 94.0, {100 * after:.1f} of 50 | 3, 5 |"
        in line
    )


def test_a_record_needs_the_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RECORD", tmp_path / "figures.json")
    written(tmp_path, 0, 0.94)
    (tmp_path / "seed_0" / "times.json").write_text('{"command_seconds": [60.0]}')
    with pytest.raises(SystemExit, match="noted no CPU time"):
        curves.main(["libero_spatial_new", "--seeds", "0", "--plot-only", "--record", "--output", str(tmp_path)])
    assert figures.read() == {}


def test_a_record_is_of_the_recipe_as_it_is() -> None:
    for wrong in (["math", "--record", "--quick"], ["math", "--record", "actor.seed=3"], ["all", "actor.seed=3"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_all_goes_on_after_a_missed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demanded = [name for name, recipe in RECIPES.items() if recipe.line != Line()]
    assert 1 < len(demanded) < len(RECIPES)
    for name in demanded:
        written(tmp_path / name, 0, 0.3)
    with pytest.raises(SystemExit) as told:
        curves.main(["all", "--plot-only", "--output", str(tmp_path)])
    assert all(f"{name}, seed 0" in str(told.value) for name in demanded)
    assert all((tmp_path / name / "curve.png").exists() for name in demanded)


def test_pages_of_recipes_are_there() -> None:
    docs = Path(curves.__file__).parents[1] / "docs"
    assert all((docs / recipe.page).exists() for recipe in RECIPES.values())
