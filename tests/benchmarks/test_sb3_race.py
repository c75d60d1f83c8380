"""The race with Stable-Baselines3: what is read from both sides, how it is compared, and short runs of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from benchmarks.sb3_race import (
    EPISODES,
    OURS,
    RACES,
    SB3,
    Race,
    Trained,
    draw,
    goal,
    rows,
    run_ours,
    run_sb3,
    sb3_input,
    trained,
)
from embodied_rl.cli import config_of
from embodied_rl.envs.gymnasium import GymnasiumEnv, GymnasiumParams
from embodied_rl.schema import EmbodiedConfig

TINY = replace(RACES["cartpole"], steps=2, rollout=256, every=1)


def run(*returns: float, start: float = 1.0) -> Trained:
    """An evaluation each 10 seconds and 100 env steps."""
    counts = range(1, len(returns) + 1)
    times = [10.0 * i for i in counts]
    return Trained(
        start=start, env_steps=[100 * (i + 1) for i in range(len(returns))], seconds=times, returns=[*returns]
    )


def test_times_leave_evaluations_out_and_the_start_in() -> None:
    lines = [
        {"env/steps_total": 10, "time/step": 2.0},
        {"env/steps_total": 20, "time/step": 2.0, "eval/seconds": 5.0, "eval/return": 3.0},
        {"env/steps_total": 30, "time/step": 2.0, "eval/seconds": 7.0, "eval/return": 4.0},
    ]
    found = trained(lines, [6.0, 13.5, 22.5], 0.1)
    assert found.start == 4.0
    assert found.env_steps == [20, 30]
    assert found.seconds == [8.5, 10.5]
    assert found.returns == [30.0, 40.0]


def test_the_first_evaluation_at_the_threshold_counts() -> None:
    assert run(1, 5, 3, 6).reached(5) == (200, 20.0)
    assert run(1, 2).reached(5) is None


def test_the_table_says_where_a_seed_never_got_there() -> None:
    race = replace(RACES["cartpole"], threshold=5)
    ours, theirs = rows("cartpole", race, {OURS: [run(1, 6), run(5, 5)], SB3: [run(1, 2), run(9, 4)]})
    assert ours == ["cartpole, 5", OURS, "200, 100", "20, 10", "15", "1.0", "20", "6, 5"]
    assert theirs == ["cartpole, 5", SB3, "never, 100", "never, 10", "–", "1.0", "20", "2, 4"]
    assert goal(replace(race, threshold=None), {OURS: [run(9)], SB3: [run(1), run(4)]}) == 2.5


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
    assert race.reward_coef == config.env.reward_coef
    assert config.env.init_params["id"] == race.id


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_short_runs_of_both(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="the extra for dev is not installed")
    found = {OURS: [run_ours(TINY, 0, tmp_path)], SB3: []}
    (tmp_path / "sb3").mkdir()
    found[SB3].append(run_sb3(TINY, 0, tmp_path / "sb3"))
    assert found[OURS][0].env_steps == [1024, 2048]
    assert found[SB3][0].env_steps == [256, 512]
    for (side,) in found.values():
        assert side.start > 0
        assert side.seconds[0] > side.start
        assert all(value > 8 for value in side.returns)
    draw(tmp_path / "race.png", {"cartpole": found})
    assert (tmp_path / "race.png").stat().st_size > 10_000
