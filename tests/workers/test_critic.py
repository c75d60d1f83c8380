"""A critic of its own, from the simulators to its update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy
from embodied_rl.tasks.planning import plan_of
from embodied_rl.training.critic import Critic
from tests.configs import config_of
from tests.fakes import seen_after
from tests.workers.job import ChunkSpy, Job, easy, small

CRITIC = ("algorithm=ppo", "critic.enable=true")
AUTO_RESET = ("env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=16")


def critic_of(job: Job) -> Critic:
    critic = job.actor._critic
    assert critic is not None
    return critic


def first_value(model: Policy, obs: object) -> torch.Tensor:
    return model.values(obs)[:, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
@pytest.mark.parametrize("resets", [(), AUTO_RESET])
def test_what_follows_is_valued_by_the_critic(
    monkeypatch: pytest.MonkeyPatch, reward_type: str, resets: tuple[str, ...]
) -> None:
    """Episodes of at most 6 steps end in the middle of chunks of 4: V of what the env showed last, in all of them."""
    spy = ChunkSpy(monkeypatch)
    config = small(*CRITIC, f"algorithm.reward_type={reward_type}", "env.train.max_episode_steps=6", *resets)
    truncated = finals = compared = 0
    with Job(easy(config, 0.95)) as job:
        assert job.policy.spec.values_per_chunk == 0
        trajectories, _, _ = job.roll()
        critic = critic_of(job)
        for trajectory in trajectories:
            [valued] = critic.value([trajectory]) if trajectory.values is None else [trajectory]
            assert valued.values is not None and valued.bootstrap_values is not None
            results = spy.results[int(valued.env_ids[0])]
            for t, result in enumerate(results):
                expected = first_value(critic.model, seen_after(result))
                if result.final_obs is not None:
                    place = [valued.env_ids.tolist().index(i) for i in result.final_obs.env_ids.tolist()]
                    expected[place] = first_value(critic.model, result.final_obs)
                    finals += len(place)
                asked = result.valid.any(-1) & ~result.terminated.any(-1)
                found = valued.bootstrap_values[t]
                assert torch.allclose(found[asked], expected[asked], rtol=0, atol=1e-6)
                assert (found[~asked & result.valid.any(-1)] == 0).all(), "nobody asks after a termination"
                truncated, compared = truncated + int(result.truncated.sum()), compared + int(asked.sum())
    assert truncated > 0 and compared > truncated
    assert bool(finals) == bool(resets)


def test_the_policy_waits_for_the_critic() -> None:
    with Job(small(*CRITIC, "algorithm.critic_warmup_steps=1")) as job:
        before, values = job.weights(), [p.detach().clone() for p in critic_of(job).model.parameters()]
        job.roll()
        metrics = job.update()
        after = job.weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert any(not torch.equal(*pair) for pair in zip(values, critic_of(job).model.parameters(), strict=True))
        assert metrics["value_loss"] > 0 and "policy_loss" not in metrics
        job.roll(1)
        metrics = job.update(1)
        assert metrics["optimizer_steps"] == metrics["critic_optimizer_steps"] == 16
        assert any(not torch.equal(before[name], tensor) for name, tensor in job.weights().items())


def test_a_run_starts_from_a_checkpoints_critic(tmp_path: Path) -> None:
    with Job(small(*CRITIC)) as job:
        job.roll()
        job.update()
        job.actor.save(tmp_path, contents=("model",))
        saved = {name: t.clone() for name, t in critic_of(job).model.state_dict().items()}
    with Job(small(*CRITIC), initial=tmp_path) as job:
        loaded = critic_of(job).model.state_dict()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    with Job(small("algorithm=ppo"), initial=tmp_path) as job:
        assert job.policy.spec.values_per_chunk == 1, "a fresh value head on its policy"


def test_its_size_may_differ() -> None:
    with Job(small(*CRITIC, "++critic.params.hidden_size=8")) as job:
        sizes = [p.shape for p in critic_of(job).model.parameters()]
        assert all(16 not in size for size in sizes)
        job.roll()
        assert job.update()["value_loss"] > 0


def test_options_that_it_does_not_have_are_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"critic\.params\.hidden_sise"):
        plan_of(small(*CRITIC, "++critic.params.hidden_sise=8"))


def test_an_evaluation_needs_none() -> None:
    plan = plan_of(config_of(*CRITIC, "runner.only_eval=true"))
    assert plan.trained_critic is None
    assert plan.policy_values == 0
