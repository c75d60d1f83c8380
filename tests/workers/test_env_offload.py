"""``enable_offload`` of envs: simulators give back what they hold, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from embodied_rl.contracts import EpisodeRecord, Trajectory
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.schema import EmbodiedConfig
from tests.configs import embodied
from tests.workers.job import Job, easy, small

TRAIN, EVAL = "env.train.enable_offload=true", "env.eval.enable_offload=true"
GOING_ON = (
    "algorithm=ppo",
    "env.train.auto_reset=true",
    "env.train.max_episode_steps=40",
    "env.train.max_steps_per_rollout_epoch=8",
)
LANES = 4
"""Two workers with two stages each, as always here; each has a simulator to train with and one to evaluate with."""


class Counted(DummyEnv):
    """Counts the simulators that there are."""

    alive: ClassVar[Counter[str]] = Counter()

    def __init__(self, num_slots: int, params: DummyParams, seed: int) -> None:
        super().__init__(num_slots, params, seed)
        Counted.alive["built"] += 1
        Counted.alive["now"] += 1

    def close(self) -> None:
        Counted.alive["now"] -= 1


class Releasing(Counted):
    """Gives back its buffers, which it takes again in the next call, by itself."""

    _kept: dict[str, Any] | None = None

    def release(self) -> None:
        Counted.alive["released"] += 1
        self._kept = {name: vars(self).pop(name) for name in ("_position", "_goal")}

    def __getattr__(self, name: str) -> Any:
        kept = vars(self).get("_kept")
        if not kept or name not in kept:
            raise AttributeError(name)
        vars(self).update(kept)
        self._kept = None
        return vars(self)[name]


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    Counted.alive.clear()
    yield
    assert Counted.alive["now"] == 0, "the run leaves none behind"


def config(adapter: type[DummyEnv], *options: str) -> EmbodiedConfig:
    return easy(small(f"env.env_type={__name__}:{adapter.__name__}", *options))


def course(config: EmbodiedConfig) -> tuple[list[list[Trajectory]], list[EpisodeRecord], list[int]]:
    """Three training steps and an evaluation after each; the simulators that there are after each of these six."""
    trajectories, episodes, alive = [], [], []
    with Job(config) as job:
        for step in range(3):
            found, reports, _ = job.roll(step)
            alive.append(Counted.alive["now"])
            trajectories.append(found)
            episodes += [episode for report in reports for episode in report.episodes]
            job.update(step)
            job.sync(step + 1)
            episodes += job.evaluate(step + 1)
            alive.append(Counted.alive["now"])
    return trajectories, episodes, alive


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit."""
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, expected)
    elif dataclasses.is_dataclass(got):
        for field in dataclasses.fields(got):
            assert_same(getattr(got, field.name), getattr(expected, field.name))
    elif isinstance(got, dict):
        assert got.keys() == expected.keys()
        assert_same(list(got.values()), list(expected.values()))
    elif isinstance(got, Sequence) and not isinstance(got, str):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize("adapter", [Counted, Releasing])
@pytest.mark.parametrize("options", [(), GOING_ON], ids=["whole", "going on"])
def test_a_run_is_the_same_bit_for_bit(adapter: type[DummyEnv], options: tuple[str, ...]) -> None:
    trajectories, episodes, kept = course(config(adapter, *options))
    assert kept == [LANES] + [2 * LANES] * 5
    Counted.alive.clear()
    *found, alive = course(config(adapter, *options, TRAIN, EVAL))
    assert_same(found, [trajectories, episodes])
    if adapter is Counted:
        assert alive == [0] * 6
        assert Counted.alive["built"] == LANES * (1 + 3 + 3), "once more than there were rollouts, for its sizes"
    else:
        assert alive == kept and Counted.alive["released"] == LANES * (1 + 3 + 3)


def test_envs_of_evaluations_alone_may_be_released() -> None:
    *_, alive = course(config(Counted, *GOING_ON, EVAL))
    assert alive == [LANES] * 6
    assert Counted.alive["built"] == LANES * (1 + 3)
    Counted.alive.clear()
    *_, alive = course(config(Counted, TRAIN))
    assert alive == [0, *[LANES] * 5], "the evaluation's stays"


@pytest.mark.parametrize("adapter", [Counted, Releasing])
def test_a_checkpoints_episodes_go_on(adapter: type[DummyEnv]) -> None:
    trajectories, *_ = course(config(adapter, *GOING_ON))
    options = (*GOING_ON, TRAIN)
    with Job(config(adapter, *options)) as job:
        _, reports, _ = job.roll(0)
        episodes = [episode for report in reports for episode in report.open_episodes]
    with Job(config(adapter, *options, "cluster.component_placement.env=0", "rollout.pipeline_stage_num=1")) as job:
        assert job.resume(episodes) == []
        starts = torch.cat([t.replay_inputs["state"][0] for t in job.roll(1)[0]])
    assert torch.equal(starts, torch.cat([t.replay_inputs["state"][0] for t in trajectories[1]]))


class Restless(DummyEnv):
    """Takes no step twice alike."""

    _rng = np.random.default_rng(0)

    def step(self, slots: Sequence[int], actions: Any) -> Any:
        return super().step(slots, actions + self._rng.normal(0, 0.1, actions.shape).astype(np.float32))


def test_a_simulator_that_does_not_repeat_itself_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with Job(config(Restless, *GOING_ON, TRAIN)) as job:
        job.roll(0)
        assert "did not come" not in capsys.readouterr().out
        job.roll(1)
    assert "did not come to the very state that they were in" in capsys.readouterr().out


def test_what_steps_while_the_actor_updates_releases_nothing() -> None:
    with pytest.raises(Exception, match=r"rollout.max_staleness: got 1 with env.train.enable_offload=true.*set one of"):
        embodied("env=dummy", "model=mlp", "cluster=process", "rollout.max_staleness=1", TRAIN)
