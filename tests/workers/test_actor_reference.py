"""The reference policy and the penalty's weight in a whole actor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_rl.errors import ConfigError
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.training.scoring import Reference
from tests.gathered import full_state_dict
from tests.training.learner import same
from tests.workers.job import Job, easy, small


def adaptive(*overrides: str) -> EmbodiedConfig:
    return easy(
        small(
            "algorithm=grpo",
            "algorithm.group_size=2",
            "algorithm.kl_beta=0.5",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.target_kl=1e-6",
            "algorithm.kl_ctrl.horizon=32",
            "algorithm.update_epoch=3",
            "actor.optim.lr=0.01",
            *overrides,
        ),
        0.7,
    )


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_adaptive_weight_follows_the_divergence_and_is_saved(tmp_path: Path, where: str) -> None:
    config = adaptive(f"algorithm.kl_in={where}")
    betas, divergences = [], []
    with Job(config) as job:
        for step in range(3):
            job.roll(step)
            metrics = job.update(step)
            betas.append(metrics["kl_beta"])
            divergences.append(metrics["reference_kl"])
        job.actor.save(tmp_path)
        beta = job.actor._kl.beta
    error = [max(-0.2, min(0.2, kl / 1e-6 - 1)) for kl in divergences]
    # 16 sequences a step and a horizon of 32
    assert betas == pytest.approx([0.5, 0.5 * (1 + error[0] / 2), 0.5 * (1 + error[0] / 2) * (1 + error[1] / 2)])
    assert betas[2] != betas[1]
    with Job(config) as job:
        job.actor.load(tmp_path, weights_only=False)
        assert job.actor._kl.beta == pytest.approx(beta, rel=1e-12)
    kl_ctrl = replace(config.algorithm.kl_ctrl, type="fixed")
    with Job(replace(config, algorithm=replace(config.algorithm, kl_ctrl=kl_ctrl))) as job:  # the configuration's
        job.actor.load(tmp_path, weights_only=False)
        assert job.actor._kl.beta == 0.5


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_step_that_trains_nothing_leaves_the_adaptive_weight_alone(where: str) -> None:
    filtered = "algorithm.filter_rewards=true", "algorithm.rewards_lower_bound=0.1", "algorithm.rewards_upper_bound=0.9"
    config = easy(adaptive(f"algorithm.kl_in={where}", *filtered), success_radius=1e-3)
    with Job(config) as job:
        job.roll()
        metrics = job.update()
        assert metrics["samples"] == metrics["optimizer_steps"] == 0
        assert metrics["kl_beta"] == job.actor._kl.beta == 0.5


def test_a_value_head_that_trains_alone_leaves_the_adaptive_weight_alone() -> None:
    keys = [f"algorithm.kl_ctrl.{key}" for key in ("type=adaptive", "target_kl=1e-6", "horizon=32")]
    with Job(small("algorithm=ppo", "algorithm.critic_warmup_steps=1", "algorithm.kl_beta=0.5", *keys)) as job:
        betas = []
        for step in range(3):
            job.roll(step)
            metrics = job.update(step)
            assert metrics["optimizer_steps"] > 0
            betas.append(job.actor._kl.beta)
    assert betas[0] == 0.5 != betas[1]


def test_statistics_of_the_policy_are_no_matter_of_the_reference() -> None:
    """Adapters alone are trained, but what is normalised by all rollouts so far is seen otherwise afterwards."""
    lora = ("model.lora.rank=2", "++model.params.normalize_observations=true", "actor.optim.lr=1e-12")
    with Job(small("algorithm=grpo", "algorithm.group_size=2", "algorithm.kl_beta=0.5", *lora)) as job:
        trajectories, _, _ = job.roll()
        inputs, reference = trajectories[0].replay_inputs, job.actor._scorer._reference
        assert reference is not None
        flat = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        before = reference(flat, temperature=1.0).logprobs
        job.update()
        assert torch.equal(reference(flat, temperature=1.0).logprobs, before)


def test_after_a_resume_the_reference_is_still_what_the_run_started_from(tmp_path: Path) -> None:
    config = adaptive()
    with Job(config) as job:
        initial = job.weights()
        job.roll()
        job.update()
        assert not same(job.weights(), initial)
        job.actor.save(tmp_path)
    with Job(config) as job:
        job.actor.load(tmp_path, weights_only=False)
        assert not same(job.weights(), initial)
        reference = job.actor._scorer._reference
        assert type(reference) is Reference
        assert same(full_state_dict(reference.policy), initial)


@pytest.mark.parametrize("kind", ["k3", "full"])
def test_a_reference_of_fewer_bits_gives_nearly_the_same_divergence(kind: str) -> None:
    """Both begin with the same weights, the reference with rounded ones."""
    options = ("algorithm=grpo", "algorithm.group_size=2", "algorithm.kl_beta=0.5", "actor.optim.lr=0.01")
    divergences: dict[str, list[float]] = {}
    for dtype in ("null", "bfloat16"):
        with Job(easy(small(*options, f"algorithm.kl_penalty_type={kind}", f"actor.reference_dtype={dtype}"))) as job:
            reference = job.actor._scorer._reference
            assert reference is not None
            bits = {p.dtype for name, p in reference.policy.named_parameters() if name != "log_std"}
            assert bits == {torch.float32 if dtype == "null" else torch.bfloat16}
            assert {tensor.dtype for tensor in job.weights().values() if tensor.is_floating_point()} == {torch.float32}
            divergences[dtype] = []
            for step in range(2):
                job.roll(step)
                divergences[dtype].append(job.update(step)["reference_kl"])
    whole, rounded = divergences["null"], divergences["bfloat16"]
    assert rounded != whole
    assert rounded == pytest.approx(whole, rel=0.1, abs=1e-3)


def test_the_base_under_adapters_is_no_reference_of_another_type() -> None:
    with pytest.raises(ConfigError, match="the policy without its adapters, which has the policy's type; leave it out"):
        adaptive("model.lora.rank=2", "actor.reference_dtype=bfloat16")


def test_no_reference_without_a_penalty() -> None:
    with Job(small("algorithm=grpo")) as job:
        assert job.actor._scorer._reference is None


def test_a_run_that_starts_from_a_checkpoint_refers_to_it_also_when_resumed(tmp_path: Path) -> None:
    with Job(small("algorithm=grpo", "algorithm.group_size=2")) as job:
        job.roll()
        job.update()
        job.actor.save(tmp_path / "start")
        start = job.weights()
    with Job(adaptive(), initial=tmp_path / "start") as job:
        assert same(job.weights(), start)
        job.roll()
        job.update()
        assert not same(job.weights(), start)
        job.actor.save(tmp_path / "later")
    with Job(adaptive(), initial=tmp_path / "start") as job:
        job.actor.load(tmp_path / "later", weights_only=False)
        reference = job.actor._scorer._reference
        assert type(reference) is Reference
        assert same(full_state_dict(reference.policy), start)


def test_a_value_head_that_the_start_lacks_stays_fresh_and_one_too_many_is_left_out(tmp_path: Path) -> None:
    with Job(small("algorithm=ppo")) as job:
        fresh = job.weights()
        job.actor.save(tmp_path / "with")
    with Job(small("algorithm=grpo", "algorithm.group_size=2")) as job:
        job.roll()
        job.update()
        job.actor.save(tmp_path / "without")
        trained = job.weights()
    with Job(small("algorithm=ppo"), initial=tmp_path / "without") as job:
        for name, tensor in job.weights().items():
            assert torch.equal(tensor, fresh[name] if name.startswith("value_head.") else trained[name]), name
    with Job(small("algorithm=grpo", "algorithm.group_size=2"), initial=tmp_path / "with") as job:
        assert all(torch.equal(tensor, fresh[name]) for name, tensor in job.weights().items())
