"""Rollouts that run while the actor updates: whole runs in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.launch import run
from tests.configs import tiny_math_run, tiny_run
from tests.logged import repeatable
from tests.test_end_to_end import only_run

pytestmark = pytest.mark.slow

STEPS = 6


def lines_of(config: Any) -> list[dict[str, float]]:
    return [json.loads(line) for line in (only_run(config) / "metrics.jsonl").read_text().splitlines()]


def untimed(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return list(map(repeatable, lines))


def language(directory: Path, *overrides: str) -> list[dict[str, float]]:
    config = tiny_math_run(
        directory,
        "cluster=process",
        "reward.function=tests.language.rewards.scores:by_text",
        f"runner.max_steps={STEPS}",
        "runner.eval_at_end=false",
        *overrides,
    )
    run(config)
    return lines_of(config)


def acting(directory: Path, *overrides: str) -> list[dict[str, float]]:
    config = tiny_run(directory, f"runner.max_steps={STEPS}", "runner.eval_at_end=false", *overrides)
    run(config)
    return lines_of(config)


# Eight passes over the data: the actor is much slower than those who make it.
SLOW = "algorithm.update_epoch=8"


@pytest.mark.parametrize("train", [language, acting])
def test_with_a_slow_actor_the_bound_holds(tmp_path: Path, train: Any) -> None:
    for bound in (1, 3):
        lines = train(tmp_path / str(bound), f"rollout.max_staleness={bound}", "rollout.interruptible=true", SLOW)
        assert len(lines) == STEPS
        ages = [line["actor/staleness"] for line in lines]
        assert ages[0] == 0
        assert max(ages) <= bound
        assert max(ages) > 0, "nothing ran ahead"


@pytest.mark.parametrize("train", [language, acting])
def test_one_step_ahead_is_as_reproducible_as_none(tmp_path: Path, train: Any) -> None:
    one, other = (train(tmp_path / name, "rollout.max_staleness=1") for name in "ab")
    assert [line["actor/staleness"] for line in one] == [0.0] + [1.0] * (STEPS - 1)
    assert _alike(one, other)
    on_policy = train(tmp_path / "on_policy")
    assert not any("actor/staleness" in line for line in on_policy)
    assert _alike(on_policy[:1], one[:1], but=("actor/staleness",))
    assert not _alike(on_policy[1:], one[1:], but=("actor/staleness",)), "the second rollout is of older weights"


def _alike(one: list[dict[str, float]], other: list[dict[str, float]], but: tuple[str, ...] = ()) -> bool:
    lines = [[{k: v for k, v in line.items() if k not in but} for line in untimed(run)] for run in (one, other)]
    return all(left == pytest.approx(right) for left, right in zip(*lines, strict=True))


def test_many_rollouts_may_be_far_ahead(tmp_path: Path) -> None:
    """4 lanes x 16 rollouts x 32 steps ahead: room for 2,057 messages in the channel of trajectories."""
    ahead = "rollout.max_staleness=31", "algorithm.rollout_epoch=16", "env.train.max_episode_steps=4"
    lines = acting(tmp_path, *ahead, "runner.max_steps=2")
    assert len(lines) == 2
    assert [line["env/episodes"] for line in lines] == [16 * 16] * 2


def test_it_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    options = ("rollout.max_staleness=2", "rollout.interruptible=true", "runner.val_check_interval=2")
    lines = acting(tmp_path, *options, "runner.eval_at_end=true", "runner.save_interval=3")
    assert [line["step"] for line in lines if "eval/success_rate" in line] == [2, 4, 6]
    config = tiny_run(
        tmp_path, *options, f"runner.max_steps={STEPS + 2}", "runner.resume_dir=auto", "runner.eval_at_end=false"
    )
    run(config)
    ages = [line["actor/staleness"] for line in lines_of(config) if "actor/staleness" in line]
    assert len(ages) == STEPS + 2
    assert ages[STEPS] == 0, "a run that goes on begins with the newest weights"
    assert max(ages) <= 2
