"""The race with Stable-Baselines3: what is read from both sides, how it is compared, and short runs of both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from benchmarks import race_record
from benchmarks.race_record import RECORD_FILE, RaceLogger, spent
from benchmarks.sb3_race import (
    CLEANRL,
    EPISODES,
    OURS,
    RACES,
    SB3,
    Race,
    Trained,
    cleanrl_input,
    draw,
    goal,
    in_our_env,
    rows,
    run_ours,
    run_sb3,
    sb3_input,
    trained,
)
from embodied_rl.cli import config_of
from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams
from embodied_rl.monitoring.backend import RunInfo
from embodied_rl.schema import EmbodiedConfig

TINY = replace(RACES["cartpole"], steps=2, every=1)


def run(*returns: float, start: float = 1.0) -> Trained:
    """An evaluation each 10 CPU seconds, 20 wall seconds and 100 env steps."""
    counts = range(1, len(returns) + 1)
    return Trained(
        start_wall=2 * start,
        start_cpu=start,
        env_steps=[100 * i for i in counts],
        cpu=[10.0 * i for i in counts],
        wall=[20.0 * i for i in counts],
        returns=[*returns],
    )


def test_times_leave_evaluations_out_and_the_start_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # (wall, CPU) at: the record's making; the first step's log, 2 s after it began; an evaluation's begin, its end;
    # the next one's begin, its end, and the end of what is logged of it.
    clock = iter([(1, 1), (6, 4), (6, 4), (10, 6), (16, 8), (24, 12), (30, 15), (36, 18), (36.5, 18.5)])
    monkeypatch.setattr(race_record, "spent", lambda: next(clock))
    run_info = RunInfo(run_dir=tmp_path, project_name="", experiment_name="", config={})
    logger = RaceLogger(run_info)
    logger.log(1, {"time/step": 2.0, "busy/cores": 1.0, "env/steps_total": 10})
    logger.log(2, {"time/step": 2.0, "busy/cores": 1.0, "env/steps_total": 20})
    logger.log(2, {"eval/return": 3.0})
    logger.log(3, {"time/step": 2.0, "busy/cores": 1.0, "env/steps_total": 30})
    logger.log(3, {"eval/return": 4.0})
    logger.log(3, {"eval_task/0": 1.0})
    lines = [json.loads(line) for line in (tmp_path / RECORD_FILE).read_text().splitlines()]
    found = trained(lines, 0.1)
    assert (found.start_wall, found.start_cpu) == (4, 3)
    assert found.env_steps == [20, 30]
    assert found.wall == [10, 24 - 6]
    assert found.cpu == [6, 12 - 2]
    assert found.returns == [30, 40]


def test_children_count(tmp_path: Path) -> None:
    before = spent()[1]
    own = time.process_time()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert spent()[1] - before > 2 * (time.process_time() - own)


def test_the_first_evaluation_at_the_threshold_counts() -> None:
    assert run(1, 5, 3, 6).reached(5) == 1
    assert run(1, 2).reached(5) is None


def test_the_table_compares_with_sb3() -> None:
    race = replace(RACES["cartpole"], threshold=5)
    runs = {OURS: [run(1, 6), run(5, 5)], SB3: [run(1, 2, 7, start=3), run(1, 9, 4)], CLEANRL: [run(1), run(7)]}
    ours, theirs, third = (row[2:] for row in rows("cartpole", race, runs))
    assert ours == ["200, 100", "20.0, 10.0", "15.0", "0.60", "1.0", "0.61", "40, 20", "20", "6, 5"]
    assert theirs == ["300, 200", "30.0, 20.0", "25.0", "1.00", "2.0", "1.00", "60, 40", "30", "7, 4"]
    assert third == ["never, 100", "never, 10.0", "–", "–", "1.0", "–", "never, 20", "10", "1, 7"]
    assert goal(replace(race, threshold=None), {OURS: [run(9)], SB3: [run(1), run(4)]}) == 2.5


def test_cleanrl_gets_the_numbers_of_sb3(tmp_path: Path) -> None:
    given = cleanrl_input(tmp_path, RACES["cartpole"], 3)
    assert given["script"] == str(tmp_path / "cleanrl" / "ppo.py")
    assert {"--num-envs=8", "--num-steps=32", "--num-minibatches=1", "--gae-lambda=0.8", "--seed=3"} < {*given["flags"]}
    assert {"--learning-rate=0.001", "--anneal-lr", "--total-timesteps=102400"} < {*given["flags"]}
    assert given["eval_seeds"] == sb3_input(RACES["cartpole"], 3)["eval_seeds"]
    given = cleanrl_input(tmp_path, RACES["pendulum"], 0)
    assert given["script"].endswith("ppo_continuous_action.py")
    assert {"--no-anneal-lr", "--num-minibatches=64"} < {*given["flags"]}
    given = cleanrl_input(tmp_path, RACES["halfcheetah"], 0)
    assert given["id"] == "HalfCheetah-v4"
    # For the rest the script has its own.
    assert given["flags"] == ["--seed=0", "--num-envs=1", "--total-timesteps=65536", "--anneal-lr", "--no-cuda"]


def test_both_play_the_same_held_out_episodes() -> None:
    seeds = sb3_input(RACES["cartpole"], 3)["eval_seeds"]
    assert len(set(seeds)) == EPISODES
    ours, theirs = GymnasiumEnv(1, GymnasiumParams(id="CartPole-v1"), seed=3), gymnasium.make("CartPole-v1")
    for number, seed in enumerate(seeds):
        ours.reset([0], [number])
        assert np.array_equal(ours.observe([0]).state[0], theirs.reset(seed=seed)[0])


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_races_know_their_presets(race: Race) -> None:
    config = config_of(f"experiment={race.experiment}")
    assert isinstance(config, EmbodiedConfig)
    train = config.env.train
    assert train.max_steps_per_rollout_epoch is not None
    assert race.rollout == train.total_num_envs * train.max_steps_per_rollout_epoch * config.algorithm.rollout_epoch
    assert race.steps == config.runner.max_steps
    assert race.reward_coef == config.evaluated.reward_coef
    options = config.env.init_params
    assert (options["id"], options.get("kwargs", {})) == (in_our_env(race).id, race.kwargs)
    assert options.get("wrappers", []) == [*race.wrappers]
    assert (config.eval_env is None) == (race.eval_wrappers is None)
    evaluated = config.evaluated.init_params
    assert (evaluated["id"], evaluated.get("kwargs", {})) == (in_our_env(race).id, race.kwargs)
    assert evaluated.get("wrappers", []) == [*(race.wrappers if race.eval_wrappers is None else race.eval_wrappers)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_short_runs_of_both(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="the extra for dev is not installed")
    found = {OURS: [run_ours(TINY, 0, tmp_path)], SB3: []}
    (tmp_path / "sb3").mkdir()
    found[SB3].append(run_sb3(TINY, 0, tmp_path / "sb3"))
    assert found[OURS][0].env_steps == found[SB3][0].env_steps == [1024, 2048]
    for (side,) in found.values():
        assert 0 < side.start_cpu < side.cpu[0] < side.cpu[1]
        assert 0 < side.start_wall < side.wall[0] < side.wall[1]
        assert all(value > 8 for value in side.returns)
    draw(tmp_path / "race.png", {"cartpole": found})
    assert (tmp_path / "race.png").stat().st_size > 10_000
