from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.contracts import Trajectory
from embodied_rl.models.base import Policy
from tests.gathered import full_state_dict
from tests.training.learner import Learner, same, training_config, two_epochs

UNCAPPED = "algorithm.behav_imp_weight_cap=null"
STEP = 4
"""Later than all versions in the trajectories (0 to 3): some samples are stale."""


def learner_of(mesh: DeviceMesh, *recipe: str) -> Learner:
    return Learner(mesh, training_config(*recipe))


def scored(learner: Learner, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
    diagnostics = Diagnostics()
    return learner.scorer.score(trajectories, diagnostics), diagnostics.result()


@torch.no_grad()
def evaluated(policy: Policy, t: Trajectory) -> Tensor:
    """[T,N,C,A] log-probabilities, 0 in chunks in which nothing was done."""
    flat = {key: tensor.flatten(0, 1) for key, tensor in t.replay_inputs.items()}
    logprobs = policy(flat, temperature=1.0).logprobs.view_as(t.logprobs)
    return logprobs.masked_fill(~t.valid.any(-1)[..., None, None], 0.0)


def after_update(learner: Learner, step: int = STEP) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics = learner.update(learner.batch(two_epochs(learner.config)), step=step)
    return learner.weights(), metrics


def test_without_need_nothing_is_computed(mesh: DeviceMesh) -> None:
    learner = learner_of(mesh, "grpo")
    trajectories = two_epochs(learner.config)
    got, numbers = scored(learner, trajectories)
    assert all(a is b for a, b in zip(got, trajectories, strict=True))
    assert numbers == {}


@pytest.mark.parametrize("size", ["1", "7", "null"])
def test_proximal_logprobs_are_those_of_the_present_weights(mesh: DeviceMesh, size: str) -> None:
    learner = learner_of(mesh, "decoupled_ppo", f"actor.logprob_micro_batch_size={size}")
    trajectories = two_epochs(learner.config)
    got, numbers = scored(learner, trajectories)
    gaps = []
    for before, after in zip(trajectories, got, strict=True):
        assert after.proximal_logprobs is not None
        expected = evaluated(learner.policy, before)
        assert torch.allclose(after.proximal_logprobs, expected, atol=1e-6)
        assert torch.equal(after.logprobs, before.logprobs), "the behaviour policy's stay"
        gaps.append((before.logprobs - expected).abs()[before.valid])
    assert numbers["logprob_gap"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-5)
    assert numbers["logprob_gap_max"] == pytest.approx(torch.cat(gaps).max().item(), rel=1e-5)


def test_recomputed_logprobs_replace_those_of_the_rollout(mesh: DeviceMesh) -> None:
    learner = learner_of(mesh, "grpo", "actor.recompute_logprobs=true")
    trajectories = two_epochs(learner.config)
    rubbish = [replace(t, logprobs=t.logprobs - 5.0) for t in trajectories]
    for got, right in zip(scored(learner, rubbish)[0], trajectories, strict=True):
        assert torch.allclose(got.logprobs, evaluated(learner.policy, right), atol=1e-6)
    assert learner.update(learner.batch(rubbish), step=0)["ratio_max"] < 2.0


def test_values_are_filled_in_where_the_rollout_has_none(mesh: DeviceMesh) -> None:
    learner = learner_of(mesh, "ppo", "algorithm.reward_type=action_level", "algorithm.logprob_type=action_level")
    [trajectory, _] = two_epochs(learner.config)
    bare = replace(trajectory, values=None, bootstrap_values=None)
    [got], _ = scored(learner, [bare])
    flat = {key: tensor.flatten(0, 1) for key, tensor in bare.replay_inputs.items()}
    with torch.no_grad():
        expected = learner.policy(flat, temperature=1.0).values
    assert got.values is not None
    assert got.bootstrap_values is not None
    taken = bare.valid.any(-1)
    assert torch.allclose(got.values[taken], expected.view_as(got.values)[taken], atol=1e-6)
    assert not got.bootstrap_values.any()


# The reference policy


def test_reference_logprobs_reach_the_batch_a_token_each(mesh: DeviceMesh) -> None:
    learner = learner_of(mesh, "grpo", "algorithm.kl_beta=0.1", "algorithm.logprob_type=chunk_level")
    assert learner.reference is not None
    trajectories = two_epochs(learner.config)
    got, _ = scored(learner, trajectories)
    for before, after in zip(trajectories, got, strict=True):
        assert after.reference_logprobs is not None
        assert torch.allclose(after.reference_logprobs, evaluated(learner.reference.policy, before), atol=1e-6)
        assert after.reference_kl is None
    batch = learner.batch(trajectories)
    assert batch.reference_logprobs is not None
    assert batch.reference_logprobs.shape == (len(batch), 3, 2)
    assert batch.logprobs.shape == (len(batch),)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "full"])
def test_a_penalty_in_the_reward_is_taken_off_the_score(mesh: DeviceMesh, kind: str) -> None:
    recipe = "reinforce_pp", "algorithm.adv_type=raw", "algorithm.normalize_advantages=false"
    learner = learner_of(
        mesh, *recipe, "algorithm.kl_beta=0.3", "algorithm.kl_in=reward", f"algorithm.kl_penalty_type={kind}"
    )
    assert learner.reference is not None
    [trajectory, _] = two_epochs(learner.config)
    [got], numbers = scored(learner, [trajectory])
    d = trajectory.logprobs - evaluated(learner.reference.policy, trajectory)
    assert got.reference_kl is not None
    if kind == "full":
        flat = {key: tensor.flatten(0, 1) for key, tensor in trajectory.replay_inputs.items()}
        with torch.no_grad():
            ours, theirs = (
                p(flat, temperature=1.0, with_distribution=True).distribution
                for p in (learner.policy, learner.reference.policy)
            )
        by_hand = (
            theirs["scale"].log()
            - ours["scale"].log()
            + (ours["scale"] ** 2 + (ours["loc"] - theirs["loc"]) ** 2) / (2 * theirs["scale"] ** 2)
            - 0.5
        ).view_as(d)
    else:
        by_hand = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind]
    kl = by_hand.masked_fill(~trajectory.valid[..., None], 0.0)
    assert torch.allclose(got.reference_kl.masked_fill(~trajectory.valid[..., None], 0.0), kl, atol=1e-5)
    units = trajectory.valid.sum().item() * 2
    assert numbers["reference_kl"] == pytest.approx(kl.sum().item() / units, rel=1e-4)

    batch = learner.batch([trajectory])
    score = (trajectory.rewards * trajectory.valid).sum((0, 2)) - 0.3 * kl.sum((0, 2, 3))
    for sequence, advantages, mask in zip(batch.sequence_ids, batch.advantages, batch.loss_mask, strict=True):
        expected = score[int(sequence)].expand_as(advantages)
        assert torch.allclose(advantages[mask], expected[mask], atol=1e-4)
    assert "reference_kl" not in learner.update(batch, step=0), "the loss has no penalty of its own"


def test_a_penalty_in_the_loss_pulls_towards_the_reference(mesh: DeviceMesh) -> None:
    distances = {}
    for beta in (1e-9, 10.0):
        for kind in ("k2", "k3", "full"):
            learner = learner_of(mesh, "grpo", f"algorithm.kl_beta={beta}", f"algorithm.kl_penalty_type={kind}")
            assert learner.reference is not None
            first = learner.train(first=0)["reference_kl"]
            for step in range(1, 6):
                last = learner.train(first=step)["reference_kl"]
            distances[beta, kind] = last / first
    for kind in ("k2", "k3", "full"):
        assert distances[10.0, kind] < 0.8 * distances[1e-9, kind]


def test_the_reference_is_not_trained(mesh: DeviceMesh) -> None:
    learner = learner_of(mesh, "grpo", "algorithm.kl_beta=0.1")
    assert learner.reference is not None
    before = full_state_dict(learner.reference.policy)
    learner.train()
    assert same(full_state_dict(learner.reference.policy), before)


# The decoupled loss


def test_the_ways_to_the_proximal_policy(mesh: DeviceMesh) -> None:
    outcome = {
        method: after_update(learner_of(mesh, "decoupled_ppo", UNCAPPED, f"algorithm.prox_logp_method={method}"))
        for method in ("recompute", "metrics", "loglinear")
    }
    recompute, metrics, loglinear = outcome["recompute"], outcome["metrics"], outcome["loglinear"]
    assert same(metrics[0], recompute[0]), "it trains as recompute does"
    assert not same(loglinear[0], recompute[0])
    assert metrics[1]["loglinear_error"] > 0.001
    assert "loglinear_error" not in recompute[1]


def test_fresh_samples_need_no_proximal_policy(mesh: DeviceMesh) -> None:
    """With loglinear, samples of the version that the update starts from are clipped about themselves, as in PPO."""
    weights = []
    for recipe in (
        ("decoupled_ppo", UNCAPPED, "algorithm.prox_logp_method=loglinear"),
        ("grpo", "algorithm.clip_ratio_high=null", "algorithm.clip_ratio_c=null"),
    ):
        learner = learner_of(mesh, *recipe)
        fresh = [replace(t, policy_versions=torch.full_like(t.policy_versions, 9)) for t in two_epochs(learner.config)]
        learner.update(learner.batch(fresh), step=9)
        weights.append(learner.weights())
    assert same(*weights)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [("behav_imp_weight_cap", 1.05, "behaviour_capped"), ("m2_threshold", 0.004, "m2po_masked")],
)
def test_units_far_off_the_policy_leave_sums_and_counts(mesh: DeviceMesh, key: str, value: float, name: str) -> None:
    learner = learner_of(mesh, "decoupled_ppo", UNCAPPED, f"algorithm.{key}={value}")
    batch = learner.batch(two_epochs(learner.config))
    assert batch.proximal_logprobs is not None
    distance = batch.proximal_logprobs - batch.logprobs
    if key == "behav_imp_weight_cap":
        kept = batch.loss_mask & (distance.exp() <= value)
    else:
        squares = distance[batch.loss_mask].square().sort().values
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
        kept = batch.loss_mask & (distance.square() <= squares[means < value].max())
    assert 0 < kept.sum() < batch.loss_mask.sum()
    metrics = learner.update(batch, step=0)
    assert metrics[name] == pytest.approx(1 - kept.sum().item() / batch.loss_mask.sum().item(), abs=1e-3)

    other = learner_of(mesh, "decoupled_ppo", UNCAPPED)
    other.update(replace(other.batch(two_epochs(other.config)), loss_mask=kept), step=0)
    assert same(learner.weights(), other.weights())


@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_truncated_weights_keep_every_unit(mesh: DeviceMesh, method: str) -> None:
    """A cap that nothing reaches changes nothing; a lower one trains otherwise than leaving out what is above."""
    cap = "algorithm.behav_imp_weight_cap"
    recipe, truncate = f"algorithm.prox_logp_method={method}", "algorithm.behav_imp_weight_mode=truncate"
    uncapped, _ = after_update(learner_of(mesh, "decoupled_ppo", UNCAPPED, recipe))
    reached, metrics = after_update(learner_of(mesh, "decoupled_ppo", f"{cap}=1.05", recipe, truncate))
    unreached, none = after_update(learner_of(mesh, "decoupled_ppo", f"{cap}=1e6", recipe, truncate))
    assert same(unreached, uncapped)
    assert none["behaviour_capped"] == 0 < metrics["behaviour_capped"] < 1
    assert not same(reached, uncapped)
    if method == "recompute":
        masked, share = after_update(learner_of(mesh, "decoupled_ppo", f"{cap}=1.05"))
        assert not same(reached, masked)
        assert share["behaviour_capped"] == pytest.approx(metrics["behaviour_capped"], abs=1e-6)
