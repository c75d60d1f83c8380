"""Replay against PPO: what counts as play, the ratio, the pass line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import replay_race
from benchmarks.replay_race import RACES, Played, ratio, read, report
from embodied_rl.composition import config_of
from embodied_rl.schema import EmbodiedConfig

LIBERO = RACES["libero_spatial"]


def ran(folder: Path, *successes: float | None, episodes: float) -> None:
    """A finished run, evaluated before it and after each of its steps."""
    lines: list[dict[str, Any]] = [{"step": 0, "eval/success_rate": successes[0]}]
    for step, success in enumerate(successes[1:], start=1):
        lines.append({"step": step, "env/episodes": episodes, "eval/success_rate": success})
    run = folder / "experiment" / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "times.json").write_text(json.dumps({"command_seconds": [60.0], "cpu_seconds": [60.0]}))


def test_play_adds_up_over_all_steps(tmp_path: Path) -> None:
    ran(tmp_path, 0.1, None, 0.4, None, 0.6, 0.5, episodes=16.0)
    played = read(tmp_path / "experiment" / "2026-01-01_00-00-00", LIBERO, seed=3)
    assert played == Played(seed=3, play=[0, 32, 64, 80], values=[0.1, 0.4, 0.6, 0.5])
    assert (played.until(0.6), played.until(0.05), played.until(0.61)) == (64, 32, None)


def test_the_ratio_is_of_geometric_means() -> None:
    # sqrt(1 * 4) / sqrt(8 * 32) = 2 / 16. Logarithms to base 2: means 1 and 4, variances 2 each, so the difference is
    # -3 ± t * sqrt(2 / 2 + 2 / 2) = -3 ± 4.302653 * 1.414214, with 2 degrees of freedom.
    mean, ends = ratio([1, 4], [8, 32])
    assert mean == pytest.approx(1 / 8)
    assert ends == pytest.approx((2 ** (-3 - 6.084870), 2 ** (-3 + 6.084870)), rel=1e-5)
    assert ratio([32], [96]) == (pytest.approx(1 / 3), None)


def sides(replay: list[float], ppo: list[float]) -> list[list[Played]]:
    return [
        [Played(seed=0, play=[0, 32, 64], values=replay)],
        [Played(seed=0, play=[0, 96, 192], values=ppo)],
    ]


@pytest.mark.parametrize(
    ("replay", "ppo", "missed"),
    [
        ([0.1, 0.6, 0.6], [0.1, 0.6, 0.6], None),
        ([0.1, 0.2, 0.6], [0.1, 0.2, 0.6], None),
        ([0.1, 0.2, 0.6], [0.1, 0.5, 0.6], "a ratio of 0.67, expected 0.33 at most"),
        ([0.1, 0.2, 0.4], [0.1, 0.5, 0.6], "replay not with every seed"),
        ([0.1, 0.6, 0.6], [0.1, 0.2, 0.4], "PPO not with every seed"),
    ],
)
def test_a_third_is_enough(replay: list[float], ppo: list[float], missed: str | None) -> None:
    _, said = report(LIBERO, sides(replay, ppo))
    assert said is None if missed is None else missed in (said or "")


def test_runs_that_there_are_become_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, first in ((0, 0.2), (4, 0.5)):
        ran(tmp_path / "libero_spatial" / f"replay_{seed}", 0.1, first, 0.7, episodes=16.0)
        ran(tmp_path / "libero_spatial" / f"ppo_{seed}", 0.1, first, 0.7, episodes=96.0)
    replay_race.main(["libero_spatial", "--seeds", "0,4", "--plot-only", "--output", str(tmp_path)])
    assert "replay needs 0.17 of PPO's episodes, 95 % 0.02 to 1.37" in " ".join(capsys.readouterr().out.split())
    rows = list(csv.DictReader((tmp_path / "libero_spatial" / "race.csv").open()))
    assert [list(row.values()) for row in rows[:4]] == [
        ["replay", "0", "0", "0.1"],
        ["replay", "0", "16", "0.2"],
        ["replay", "0", "32", "0.7"],
        ["replay", "4", "0", "0.1"],
    ]
    with Image.open(tmp_path / "libero_spatial" / "race.png") as picture:
        assert picture.width > 800
    with pytest.raises(SystemExit, match="holds no finished run of seed 5"):
        replay_race.main(["libero_spatial", "--seeds", "5", "--plot-only", "--output", str(tmp_path)])


@pytest.mark.parametrize("arguments", [["libero"], ["pendulum", "--seeds", "one"]])
def test_other_names_and_seeds_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replay_race.main(arguments)
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", RACES)
def test_both_sides_are_evaluated_alike_and_as_often_for_their_play(name: str) -> None:
    race = RACES[name]
    replay, ppo = (config_of(*(word.format(seed=1, folder="/tmp/out") for word in words)) for words in race.commands)
    assert isinstance(replay, EmbodiedConfig) and isinstance(ppo, EmbodiedConfig)
    assert (replay.algorithm.learner, ppo.algorithm.learner) == ("sac", "on_policy")
    for one in (replay, ppo):
        assert (one.cluster.backend, one.actor.seed, one.env.seed) == ("serial", 1, 1)
    alike = ("episodes_per_task", "max_episode_steps")
    assert [getattr(replay.env.eval, key) for key in alike] == [getattr(ppo.env.eval, key) for key in alike]
    assert replay.env.task_ids == ppo.env.task_ids
    assert replay.env.train.skip_states == ppo.env.train.skip_states
    apart = [
        config.runner.val_check_interval
        * config.env.train.total_num_envs
        * (config.env.train.max_steps_per_rollout_epoch or 1)
        for config in (replay, ppo)
    ]
    assert 0.3 < apart[0] / apart[1] < 0.4
    for words in race.commands:
        assert config_of(*(word.format(seed=1, folder="/tmp/out") for word in (*words, *race.quick)))
