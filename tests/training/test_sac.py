"""Updates of soft actor-critic on made-up batches."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.soft_q import soft_targets
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.mlp import MlpPolicy
from embodied_rl.models.registry import build_policy
from embodied_rl.schema import Config
from embodied_rl.seeding import derived_seed, generator
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.replay import Transitions
from embodied_rl.training.sac import SacUpdater, build_critics_optimizer
from embodied_rl.training.soft_critics import SoftCritics
from tests.configs import config_of

S, C, A, B = 3, 2, 2, 16
SPEC = PolicySpec(action_dim=A, num_action_chunks=C, state_dim=S, image_shapes={}, values_per_chunk=0)


def config(*overrides: str) -> Config:
    small = ("algorithm.sac.hidden_size=16", "model.params.hidden_size=16", "model.num_action_chunks=2")
    return config_of("env=dummy", "model=sac_mlp", "algorithm=sac", *(f"++{key}" for key in small), *overrides)


def batch(number: int) -> Transitions:
    rng = torch.Generator().manual_seed(number)
    return Transitions(
        inputs={"state": torch.randn(B, S, generator=rng)},
        actions=2 * torch.rand(B, C, A, generator=rng) - 1,
        rewards=torch.randn(B, generator=rng),
        discounts=torch.rand(B, generator=rng),
        next_inputs={"state": torch.randn(B, S, generator=rng)},
    )


class Trained:
    """A policy and its critics, with an updater of batches of :func:`batch`."""

    def __init__(self, c: Config, draw: Any = batch) -> None:
        torch.manual_seed(0)
        policy = build_policy("mlp", SPEC, c.model.params)
        assert isinstance(policy, MlpPolicy)
        self.policy, self.config = policy, c
        self.critics = SoftCritics.of(policy, c.algorithm.sac)
        optimizer = build_critics_optimizer(self.critics, c.algorithm.sac, c.critic.optim)
        self.updater = SacUpdater(
            policy,
            self.critics,
            (build_optimizer(policy, c.actor.optim), optimizer),
            c.algorithm.sac,
            optim=(c.actor.optim, c.critic.optim),
            draw=draw,
            seed=7,
            device="cpu",
        )

    def run(self, *updates: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for number in updates:
            metrics = self.updater.run(range(number, number + 1))
        return metrics


def values(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(before: list[torch.Tensor], module: torch.nn.Module) -> bool:
    return any(not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("backup", [True, False])
def test_critics_are_drawn_to_the_least_of_the_targets_that_take_part(backup: bool) -> None:
    """With one update's targets by hand: those of two critics of five, drawn by the update's number."""
    c = config(
        "algorithm.sac.num_critics=5",
        "algorithm.sac.policy_interval=9",
        f"algorithm.sac.backup_entropy={str(backup).lower()}",
        "algorithm.sac.initial_temperature=0.3",
    )
    trained = Trained(c)
    data = batch(4)
    noise = torch.Generator().manual_seed(derived_seed(7, 4, 1))
    with torch.no_grad():
        actions, logprobs = trained.policy.rsample(data.next_inputs, generator=noise)
        taking_part = generator(7, 4, 2).choice(5, 2, replace=False)
        targets = soft_targets(
            data.rewards,
            data.discounts,
            trained.critics.target(data.next_inputs["state"], actions)[taking_part],
            logprobs.sum((1, 2)) if backup else None,
            temperature=torch.tensor(0.3),
        )
        error = (trained.critics.online(data.inputs["state"], data.actions) - targets).square().mean()
    assert trained.run(4)["critic_loss"] == pytest.approx(error.item(), rel=1e-5)


def test_target_networks_follow_by_tau() -> None:
    trained = Trained(config("algorithm.sac.tau=0.25"))
    before = values(trained.critics.target)
    assert all(torch.equal(*pair) for pair in zip(before, trained.critics.online.parameters(), strict=True))
    trained.run(0)
    for old, new, online in zip(
        before, trained.critics.target.parameters(), trained.critics.online.parameters(), strict=True
    ):
        torch.testing.assert_close(new, old + 0.25 * (online - old))
        assert not new.requires_grad


def test_the_policy_waits_for_its_turn_and_leaves_the_critics_alone() -> None:
    trained = Trained(config("algorithm.sac.policy_interval=3"))
    policy, temperature = values(trained.policy), trained.critics.temperature.item()
    assert "policy_loss" not in trained.run(0, 1)
    assert not moved(policy, trained.policy) and trained.critics.temperature.item() == temperature
    assert "policy_loss" in trained.run(2)
    assert moved(policy, trained.policy) and trained.critics.temperature.item() != temperature

    # An update whose critics stand still: what the policy's loss leaves in them is nothing.
    still = Trained(config("critic.optim.lr=1e-30", "algorithm.sac.temperature_lr=null"))
    online, policy = values(still.critics.online), values(still.policy)
    still.run(0)
    assert moved(policy, still.policy)
    assert all(torch.allclose(*pair) for pair in zip(online, still.critics.online.parameters(), strict=True))
    assert still.critics.temperature.item() == 1.0


def test_critics_alone_leave_the_policy_and_the_temperature_as_they_are() -> None:
    trained, both = Trained(config()), Trained(config())
    policy, temperature = values(trained.policy), trained.critics.temperature.item()
    assert "policy_loss" not in trained.updater.run(range(1), critics_alone=True)
    assert not moved(policy, trained.policy) and trained.critics.temperature.item() == temperature
    both.updater.run(range(1))
    assert not moved(values(both.critics.online), trained.critics.online), "the critics' own update is the same"


def test_a_penalty_keeps_decisions_near_zero() -> None:
    """Where Q is -(a - 0.5)² in each of C·A numbers and the penalty's weight w is that of their mean, it is best to
    decide 0.5 / (1 + w / (C·A))."""

    def bandit(number: int) -> Transitions:
        data = batch(number)
        rewards = -(data.actions - 0.5).square().sum((1, 2))
        return replace(data, rewards=rewards, discounts=torch.zeros(B))

    def decided(*overrides: str) -> float:
        rates = ("actor.optim.lr=0.01", "critic.optim.lr=0.01", "algorithm.sac.temperature_lr=0.01")
        trained = Trained(config(*rates, *overrides), bandit)
        trained.updater.run(range(400))
        with torch.no_grad():
            actions, _ = trained.policy.rsample(batch(1).inputs, generator=torch.Generator().manual_seed(1))
        return float(actions.mean())

    assert decided("algorithm.sac.decision_penalty=12") == pytest.approx(0.125, abs=0.06)
    assert decided() == pytest.approx(0.5, abs=0.15)


def test_it_finds_the_best_action() -> None:
    """Chunks that are decided alone, with a reward that is highest at 0.5 in every number."""

    def bandit(number: int) -> Transitions:
        data = batch(number)
        rewards = -(data.actions - 0.5).square().sum((1, 2))
        return replace(data, rewards=rewards, discounts=torch.zeros(B))

    trained = Trained(
        config("actor.optim.lr=0.01", "critic.optim.lr=0.01", "algorithm.sac.temperature_lr=0.01"), bandit
    )
    trained.updater.run(range(400))
    with torch.no_grad():
        obs = batch(1).inputs
        actions, logprobs = trained.policy.rsample(obs, generator=torch.Generator().manual_seed(1))
    assert (actions.mean((0, 1, 2)) - 0.5).abs() < 0.15
    assert trained.critics.temperature.item() < 0.5, "the entropy is above its target until the temperature falls"
    assert -logprobs.sum((1, 2)).mean() < 0.0, "uniform actions have an entropy of 4 log 2"


def test_every_key_changes_the_result() -> None:
    def outcome(*overrides: str) -> list[torch.Tensor]:
        trained = Trained(config(*overrides))
        trained.updater.run(range(3))
        return [*values(trained.policy), trained.critics.temperature]

    base = outcome()
    assert all(torch.equal(*pair) for pair in zip(base, outcome(), strict=True))
    for override in (
        "num_critics=3",
        "target_critics=1",
        "hidden_size=8",
        "num_layers=3",
        "layer_norm=true",
        "tau=0.5",
        "policy_interval=2",
        "policy_q=mean",
        "decision_penalty=0.5",
        "initial_temperature=0.5",
        "temperature_lr=0.1",
        "target_entropy=-3.0",
        "backup_entropy=false",
    ):
        other = outcome(f"algorithm.sac.{override}")
        assert any(not torch.equal(*pair) for pair in zip(base, other, strict=True)), override
    for override in ("critic.optim.lr=0.1", "actor.optim.lr=0.1", "critic.optim.clip_grad=0.001"):
        assert any(not torch.equal(*pair) for pair in zip(base, outcome(override), strict=True)), override


def test_a_gradient_that_is_not_finite_ends_the_run_or_is_left_out() -> None:
    def broken(number: int) -> Transitions:
        return replace(batch(number), rewards=torch.full((B,), float("inf")))

    with pytest.raises(FloatingPointError, match=r"the norm of the gradient of the critics is .*critic\.optim\.lr"):
        Trained(config(), broken).run(0)
    skipping = Trained(config("critic.optim.skip_nonfinite=true"), broken)
    before = values(skipping.critics.online)
    assert skipping.run(0)["critic_nonfinite_steps"] == 1
    assert not moved(before, skipping.critics.online)


@pytest.mark.parametrize("state", [float("inf"), float("nan"), 3e38])
def test_the_temperature_waits_where_the_policys_step_is_left_out(state: float) -> None:
    """Or its moments would never be numbers again."""

    def broken(number: int) -> Transitions:
        data = batch(number)
        return replace(data, inputs={"state": data.inputs["state"].index_fill(0, torch.tensor(0), state)})

    skipping = ("actor.optim.skip_nonfinite=true", "critic.optim.skip_nonfinite=true")
    trained = Trained(config(*skipping), lambda number: broken(number) if number == 1 else batch(number))
    trained.run(0)
    before = trained.critics.temperature.item()
    trained.run(1)
    assert trained.critics.temperature.item() == before
    trained.run(2)
    after = trained.critics.temperature.item()
    assert math.isfinite(after) and after != before


def test_a_critic_alone_has_no_deviation() -> None:
    metrics = Trained(config("algorithm.sac.num_critics=1", "algorithm.sac.target_critics=1")).run(0)
    assert "q_std" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert Trained(config()).run(0)["q_std"] > 0


def test_ensemble_members_are_networks_of_their_own() -> None:
    """Each member is what its weights alone give, layer norm included."""
    c = config("algorithm.sac.num_critics=3", "algorithm.sac.layer_norm=true")
    torch.manual_seed(0)
    critics = SoftCritics(S, C * A, c.algorithm.sac)
    data = batch(0)
    found = critics.online(data.inputs["state"], data.actions)
    assert found.shape == (3, B)
    for member in range(3):
        x = torch.cat([data.inputs["state"], data.actions.flatten(1)], -1)
        for layer in critics.online.layers:
            x = x @ layer.weight[member] + layer.bias[member]  # type: ignore[index,operator]
            if layer.scale is not None:
                x = torch.nn.functional.layer_norm(x, x.shape[-1:], layer.scale[member, 0], layer.shift[member, 0])  # type: ignore[index,arg-type]
                x = x.relu()
        torch.testing.assert_close(found[member], x[:, 0])
    other = copy.deepcopy(critics)
    with torch.no_grad():
        other.online.layers[0].weight[1] += 1.0  # type: ignore[index,operator]
    changed = other.online(data.inputs["state"], data.actions)
    assert [torch.equal(changed[i], found[i]) for i in range(3)] == [True, False, True]
