"""Trajectories that the actor scores as they come, while others are still played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.contracts import Delivery, Trajectory
from embodied_rl.launch import run
from embodied_rl.workers.actor import ActorWorker, UpdateReport
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
        assert "scoring_ahead" in one.seconds and not {"scoring", "values"} & one.seconds.keys()
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
        for messages in (trajectories, trajectories[::-1], trajectories[3:] + trajectories[:3]):
            actor._forget()
            for trajectory in messages:
                actor._take(Delivery(step=0, trajectory=trajectory))
            found.append(sorted(actor._received, key=lambda t: (t.rollout_epoch, int(t.env_ids[0]))))
            assert len(actor._scored) == 8
    for others in found[1:]:
        for ours, theirs in zip(found[0], others, strict=True):
            for name in Trajectory.__dataclass_fields__:
                one, another = getattr(ours, name), getattr(theirs, name)
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, another), name


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
