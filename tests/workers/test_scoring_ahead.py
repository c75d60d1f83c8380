"""Trajectories that the actor scores as they come, while others are still played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.channel.base import run_blocking
from embodied_rl.contracts import Delivery, Trajectory
from embodied_rl.launch import run
from embodied_rl.runtime.worker import Abandoned
from embodied_rl.workers.actor import ActorWorker, UpdateReport, place
from tests.configs import tiny_run
from tests.logged import accounted
from tests.test_end_to_end import only_run
from tests.workers.job import Job, easy, small
from tests.workers.test_critic import CRITIC

LAYOUT = ("cluster.component_placement.env=0-1", "rollout.pipeline_stage_num=2", "algorithm.rollout_epoch=2")
SCORED = {
    "anew": ("algorithm=grpo", "actor.recompute_logprobs=true"),
    "penalty in the loss": ("algorithm=grpo", "algorithm.kl_beta=0.1"),
    "penalty in the reward": ("algorithm=ppo", "algorithm.kl_beta=0.1", "algorithm.kl_in=reward"),
    "exact": ("algorithm=ppo", "algorithm.kl_beta=0.1", "algorithm.kl_in=reward", "algorithm.kl_penalty_type=full"),
    "proximal": ("algorithm=decoupled_ppo",),
    "critic": CRITIC,
}


def updated(*options: str, ahead: bool) -> tuple[list[UpdateReport], dict[str, torch.Tensor]]:
    with Job(easy(small(*LAYOUT, *options))) as job:
        assert job.actor._scores_ahead
        job.actor._scores_ahead = ahead
        reports = []
        for step in range(2):
            job.roll(step)
            reports += job._actor.call(ActorWorker.update, step=step).wait()
            job.sync(step + 1)
        return reports, job.weights()


@pytest.mark.parametrize("options", SCORED.values(), ids=SCORED)
def test_training_is_the_same(options: tuple[str, ...]) -> None:
    (ours, weights), (theirs, expected) = (updated(*options, ahead=ahead) for ahead in (True, False))
    for one, another in zip(ours, theirs, strict=True):
        assert one.metrics == pytest.approx(another.metrics, rel=1e-3, abs=1e-5)
        assert one.seconds["scoring_ahead"] > 0 and "values" not in one.seconds
        assert "scoring" in another.seconds and "scoring_ahead" not in another.seconds
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", SCORED.values(), ids=SCORED)
def test_messages_may_come_in_any_order(options: tuple[str, ...]) -> None:
    with Job(easy(small(*LAYOUT, *options))) as job:
        actor, found = job.actor, []
        actor._scores_ahead = False
        trajectories, _, _ = job.roll()
        actor._scores_ahead = True
        assert len(trajectories) == 8
        for order in (range(8), range(7, -1, -1), (3, 7, 0, 4, 1, 6, 2, 5)):
            actor._forget()
            arrived: list[Delivery] = []
            for number in order:
                arrived.append(Delivery(step=0, trajectory=trajectories[number]))
                actor._score_ahead(arrived)
            scored = [delivery.trajectory for delivery in arrived if delivery.trajectory is not None]
            found.append(sorted(scored, key=place))
            assert len(actor._scored) == 8
    for others in found[1:]:
        for ours, theirs in zip(found[0], others, strict=True):
            for name in Trajectory.__dataclass_fields__:
                one, another = getattr(ours, name), getattr(theirs, name)
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, another), name


def test_nothing_is_scored_while_a_message_waits() -> None:
    """It may be the order to give up, after which the run is to end at once."""
    with Job(easy(small(*LAYOUT, *SCORED["anew"]))) as job:
        actor = job.actor
        actor._scores_ahead = False
        trajectories, _, _ = job.roll()
        actor._scores_ahead = True
        actor._forget()
        arrived = [Delivery(step=0, trajectory=trajectory) for trajectory in trajectories]
        run_blocking(actor._trajectories.put(Abandoned(), key=0))
        actor._score_ahead(arrived)
        assert not actor._scored
        run_blocking(actor._trajectories.get(key=0))
        actor._score_ahead(arrived)
        assert len(actor._scored) == 8


@pytest.mark.parametrize("key", ["actor", "rollout", "critic", "env.train", None])
def test_who_takes_turns_on_a_device_waits(key: str | None) -> None:
    with Job(small(*LAYOUT, *CRITIC)) as job:
        config = job.config
        offloads = {"enable_offload": True}
        if key == "env.train":
            config = replace(config, env=replace(config.env, train=replace(config.env.train, **offloads)))
        elif key is not None:
            config = replace(config, **{key: replace(getattr(config, key), **offloads)})
        job.actor._plan = replace(job.actor._plan, config=config)
        assert job.actor._takes_turns() == (key is not None)


def test_nothing_is_noted_where_nobody_is_asked() -> None:
    reports, _ = updated("algorithm=ppo", ahead=True)
    assert all("scoring_ahead" not in report.seconds for report in reports)


def test_several_ranks_score_together_in_the_update(tmp_path: Path) -> None:
    """They would have to agree on an order, also when a run is interrupted."""
    options = ("algorithm=grpo", "algorithm.group_size=4", "actor.recompute_logprobs=true", "runner.max_steps=1")
    placement = "cluster.component_placement={env: 0, rollout: 0, actor: 0-1}"
    config = tiny_run(tmp_path, "cluster=process", placement, "runner.eval_at_end=false", *options)
    run(config)
    [step] = accounted(only_run(config))
    assert step["time/scoring"] > 0 and "time/scoring_ahead" not in step
