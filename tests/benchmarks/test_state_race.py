"""The race of env steps a second: what is read of the other sides, and short runs of ours."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest

from benchmarks import state_race
from benchmarks.puffer_steps import steps_per_second
from benchmarks.state_race import one_core, ours_training, reported, show
from embodied_rl.cli import config_of
from embodied_rl.schema import EmbodiedConfig

LOG = """
[36m[2026-11-27 20:53:10,500][25148] Fps is (10 sec: nan, 60 sec: nan). Total num frames: 4096. Throughput: 0: nan.[0m
[36m[2026-11-27 20:53:10,501][25148] Avg episode reward: [(0, '-75.512')][0m
[36m[2026-11-27 20:53:15,500][25148] Fps is (10 sec: 3276.7). Total num frames: 20480. Throughput: 0: 3780.7.[0m
[36m[2026-11-27 20:53:20,750][25148] Fps is (10 sec: 3276.8). Total num frames: 36864. Throughput: 0: 2784.0.[0m
[36m[2026-11-27 20:53:20,751][25148] Avg episode reward: [(0, '-346.266')][0m
"""


def test_sample_factory_s_log_tells_steps_and_return_without_the_start() -> None:
    assert reported(LOG) == (32768 / 10.25, -346.266)
    with pytest.raises(SystemExit, match="got 1 reports of Sample Factory"):
        reported(LOG[:200])


def test_steps_alone_are_counted_on_both_sides() -> None:
    envs = gymnasium.make_vec("CartPole-v1", 4)
    assert steps_per_second(envs, 4, 0.1) > 100
    assert one_core(0.1, 4) > 100


def test_ours_has_the_numbers_of_sample_factory_s_example(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> str:
        commands.append(command)
        folder = next(word for word in command if word.startswith("runner.output_dir=")).partition("=")[2]
        lines = ["{}", *[f'{{"time/step": {s}, "env/steps": 4096, "env/return": {s}}}' for s in (9, 1, 3)]]
        (Path(folder) / "metrics.jsonl").write_text("\n".join(lines))
        return ""

    monkeypatch.setattr(state_race, "run", run)
    assert ours_training(3 * state_race.ROLLOUT, ("cluster=serial",)) == (2048, 30)
    config = config_of(*commands[0][2:])
    assert isinstance(config, EmbodiedConfig)
    train, algorithm = config.env.train, config.algorithm
    assert train.max_steps_per_rollout_epoch is not None
    assert train.total_num_envs * train.max_steps_per_rollout_epoch == state_race.ROLLOUT
    assert (algorithm.update_epoch, algorithm.n_minibatches, config.runner.max_steps) == (2, 4, 3)
    assert config.env.reward_coef == state_race.REWARD_COEF


def test_the_table_has_medians() -> None:
    table = show({"stepping: ours": [(100.0, None), (300.0, None), (200.0, None)], "training: ours": [(1.0, 5.0)]})
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["training: ours", "stepping: ours"],
        ["1", "200"],
        ["1 to 1", "100 to 300"],
        ["5", ""],
    ]
