"""Rollouts that run while the actor updates: whole runs in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.algorithms.catalog import LEARNERS
from embodied_rl.checkpoints.store import complete_checkpoints
from embodied_rl.launch import run
from embodied_rl.runtime.signals import Terminated
from embodied_rl.tasks import saving
from embodied_rl.workers.actor import ActorWorker, UpdateReport, place
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


@pytest.mark.parametrize(
    "options",
    [("rollout.max_staleness=2", "rollout.interruptible=true"), ("rollout.max_staleness=1", "rollout.chunks_ahead=2")],
    ids=" ".join,
)
def test_it_evaluates_saves_and_resumes(tmp_path: Path, options: tuple[str, ...]) -> None:
    options = (*options, "runner.val_check_interval=2")
    lines = acting(tmp_path, *options, "runner.eval_at_end=true", "runner.save_interval=3")
    assert [line["step"] for line in lines if "eval/success_rate" in line] == [2, 4, 6]
    config = tiny_run(
        tmp_path, *options, f"runner.max_steps={STEPS + 2}", "runner.resume_dir=auto", "runner.eval_at_end=false"
    )
    run(config)
    ages = [line["actor/staleness"] for line in lines_of(config) if "actor/staleness" in line]
    assert len(ages) == STEPS + 2
    assert ages[STEPS] == 0, "a run that goes on begins with the newest weights"
    assert max(ages) <= config.rollout.max_staleness


class NotingActor(ActorWorker):
    """Writes down the weights that made each chunk of what it trains on."""

    def update(self, *, step: int) -> UpdateReport:
        assert all((t.policy_versions == t.policy_versions[:, :1]).all() for t in self._received), "all episodes last"
        versions = sorted((*place(t), t.policy_versions[:, 0].tolist()) for t in self._received)
        with (Path(self._plan.config.runner.output_dir) / "versions.jsonl").open("a") as file:
            file.write(json.dumps([step, versions]) + "\n")
        return super().update(step=step)


def versions_of(directory: Path) -> dict[int, list[tuple[int, list[int]]]]:
    """Training step -> of each lane's trajectories, rollout epoch and the version that made each chunk."""
    lines = map(json.loads, (directory / "results/versions.jsonl").read_text().splitlines())
    return {step: [(epoch, versions) for epoch, _, versions in lanes] for step, lanes in lines}


CHUNKS = 4
"""16 steps in chunks of 4."""
VALUES = ("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_episode_steps=10", SLOW)
"""Auto-reset, with values of last states."""


@pytest.fixture
def actor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of runs are of the class that is the parameter."""
    learner = replace(LEARNERS["on_policy"], worker=f"{__name__}:{request.param.__name__}")
    monkeypatch.setattr("embodied_rl.tasks.embodied.run.LEARNERS", {"on_policy": learner})


@pytest.mark.parametrize("actor", [NotingActor], indirect=True)
@pytest.mark.parametrize(
    ("ahead", "options"),
    [
        (3, ("env.train.max_steps_per_rollout_epoch=16", *VALUES)),
        (1, ("cluster.component_placement.rollout=0-1", "actor.verify_weight_sync=true", SLOW)),
        (5, ("algorithm.rollout_epoch=2", "algorithm=ppo")),
        (CHUNKS, ("algorithm=ppo",)),
    ],
    ids=["values", "two workers", "two epochs", "all chunks"],
)
@pytest.mark.usefixtures("actor")
def test_a_rollouts_first_chunks_run_ahead(tmp_path: Path, ahead: int, options: tuple[str, ...]) -> None:
    """Each lane's first chunks are of the weights before the update, all others of those after it, in every run."""
    options = ("rollout.max_staleness=1", "runner.val_check_interval=2", *options)
    one, other = (acting(tmp_path / name, *options, f"rollout.chunks_ahead={ahead}") for name in "ab")
    assert untimed(one) == untimed(other)
    assert [line["step"] for line in one if "eval/success_rate" in line] == [2, 4, 6]
    steps = [line for line in one if "actor/staleness" in line]
    assert [line["actor/staleness"] for line in steps] == [0.0] + [1.0] * (STEPS - 1)
    within = float(ahead != CHUNKS)
    assert [line["rollout/interruptions"] for line in steps] == [0.0] + [within] * (STEPS - 1)
    found = versions_of(tmp_path / "a")
    assert found == versions_of(tmp_path / "b")
    assert len(found) == STEPS
    for step, lanes in found.items():
        assert len(lanes) >= 4
        for epoch, versions in lanes:
            older = min(max(ahead - epoch * CHUNKS, 0), CHUNKS) if step else 0
            assert versions == [step - 1] * older + [step] * (CHUNKS - older)
    if not within:
        assert untimed(one) == untimed(acting(tmp_path / "without", *options))


class LateActor(ActorWorker):
    """Takes its time for the third update, and says so."""

    def update(self, *, step: int) -> UpdateReport:
        if step == 2:
            (Path(self._plan.config.runner.output_dir) / "updating").touch()
            time.sleep(1.5)
        return super().update(step=step)


@pytest.mark.parametrize("actor", [LateActor], indirect=True)
@pytest.mark.parametrize(
    ("number", "ending", "grace", "saved"),
    [
        (signal.SIGTERM, Terminated, 0.0, 2),
        (signal.SIGTERM, Terminated, 10.0, 3),
        (signal.SIGINT, KeyboardInterrupt, 0.0, 3),
    ],
)
@pytest.mark.usefixtures("actor")
def test_a_run_ends_while_its_rollout_waits_for_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    ending: type[BaseException],
    grace: float,
    saved: int,
) -> None:
    """They never come. After SIGTERM in a long update the last step's checkpoint is there, otherwise the update's."""
    monkeypatch.setattr(saving, "_GRACE_S", grace)
    ahead = ("rollout.max_staleness=1", "rollout.chunks_ahead=1", "runner.save_interval=1")
    config = tiny_run(tmp_path, *ahead, f"runner.max_steps={STEPS}", "runner.eval_at_end=false")
    asked: list[float] = []

    def end() -> None:
        while not (tmp_path / "results/updating").exists():
            time.sleep(0.01)
        time.sleep(0.5)  # the chunk ahead is played
        asked.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(ending):
        run(config)
    assert time.monotonic() - asked[0] < 10, "no worker had to be killed"
    assert complete_checkpoints(only_run(config) / "checkpoints")[-1].name == f"global_step_{saved}"
