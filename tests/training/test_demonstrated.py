"""Keeping to demonstrations (``algorithm.bc_coef``)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.seeding import generator
from tests.training.learner import Learner, RandomFrames, distance, trained, training_config

SHOWN = "algorithm.bc_path=shown", "algorithm.bc_batch_size=7", "actor.micro_batch_size=3"


def gradients(learner: Learner, number: int, scale: float = 1.0) -> tuple[list[torch.Tensor], float]:
    """What one call of ``Demonstrated.backward`` leaves, and the loss that it reports."""
    demonstrated, found = learner.updater._demonstrated, Diagnostics()
    assert demonstrated is not None
    learner.policy.zero_grad(set_to_none=True)
    demonstrated.backward(step=4, number=number, scale=scale, diagnostics=found)
    return [p.grad.clone() for p in learner.policy.parameters() if p.grad is not None], found.result()["bc_loss"]


def test_the_term_is_the_mean_over_the_actions_that_there_are(mesh: DeviceMesh) -> None:
    config = training_config("ppo", "algorithm.bc_coef=0.5", *SHOWN)
    learner, frames = Learner(mesh, config), RandomFrames()
    got, loss = gradients(learner, number=2, scale=3.0)
    rows = torch.from_numpy(generator(config.actor.seed, 4, 2, 1).integers(20, size=7))
    learner.policy.zero_grad(set_to_none=True)
    inputs = {"state": frames.state[rows], "samples": frames.actions[rows]}
    by_hand = -learner.policy(inputs, temperature=1.0).logprobs[frames.valid[rows]].mean()
    (3.0 * 0.5 * by_hand).backward()
    expected = [p.grad for p in learner.policy.parameters() if p.grad is not None]
    assert loss == by_hand.item() or abs(loss - by_hand.item()) < 1e-6
    assert len(got) == len(expected)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_each_optimiser_step_draws_frames_of_its_own(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("ppo", "algorithm.bc_coef=0.5", *SHOWN))
    losses = [gradients(learner, number)[1] for number in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def test_training_comes_nearer_to_what_was_shown(mesh: DeviceMesh) -> None:
    plain = trained(mesh, training_config("grpo"), 3)
    kept = trained(mesh, training_config("grpo", "algorithm.bc_coef=5.0", *SHOWN), 3)
    assert "bc_loss" not in plain["metrics"]
    assert (
        kept["metrics"]["bc_loss"]
        < trained(mesh, training_config("grpo", "algorithm.bc_coef=5.0", *SHOWN), 1)["metrics"]["bc_loss"]
    )
    assert distance(plain["weights"], kept["weights"]) > 1e-3


def test_the_critics_warm_up_leaves_the_policy_alone(mesh: DeviceMesh) -> None:
    before = Learner(mesh, training_config("ppo")).weights()
    config = training_config("ppo", "algorithm.bc_coef=5.0", "algorithm.critic_warmup_steps=1", *SHOWN)
    after = trained(mesh, config, 1)["weights"]
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert all("value" in name or "critic" in name for name in moved), moved
