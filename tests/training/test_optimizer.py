from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from embodied_rl.models.base import Policy
from embodied_rl.training.optimizer import build_optimizer
from tests.training.learner import same, trained, training_config
from tests.training.rollouts import small_policy
from tests.training.samples import model


def options_of(optimizer: Optimizer, policy: Policy) -> dict[str, tuple[float, float]]:
    """Parameter -> (learning rate, weight decay)."""
    names = {id(p): name for name, p in policy.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_every_parameter_has_its_learning_rate_and_decay() -> None:
    policy = small_policy(1)
    config = training_config(
        "ppo", "actor.optim.lr=0.5", "actor.optim.value_lr=0.25", "actor.optim.weight_decay=0.125"
    ).actor.optim
    options = options_of(build_optimizer(policy, config), policy)
    assert options.keys() == {name for name, _ in policy.named_parameters()}
    for name in options:
        lr = 0.25 if name.startswith("value_head.") else 0.5
        assert options[name] == (lr, 0.125 if name.endswith(".weight") else 0.0), name


class Normed(nn.LayerNorm):
    """A norm whose weight has two dimensions."""

    def __init__(self) -> None:
        super().__init__([2, 3])


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("mlp", ["policy.0.weight", "policy.2.weight", "policy.4.weight"]),
        ("causal_lm", ["model.model.layers.0.self_attn.q_proj.weight", "model.model.embed_tokens.weight"]),
        ("tiny_vla", ["blocks.0.query.weight", "cameras.agentview.convolutions.0.weight", "words.weight"]),
    ],
)
def test_norms_and_biases_are_not_decayed(name: str, decayed: list[str]) -> None:
    policy = model(name)
    policy.extra = Normed()
    undecayed = {id(p) for p in policy.undecayed_parameters()}
    for key, parameter in policy.named_parameters():
        if "norm" in key or key.startswith("extra") or key.endswith("bias") or key == "log_std":
            assert id(parameter) in undecayed, key
        elif parameter.ndim >= 2:
            assert id(parameter) not in undecayed, key
    parameters = dict(policy.named_parameters())
    assert not undecayed & {id(parameters[key]) for key in decayed}


def test_adamw_is_fused() -> None:
    assert all(
        group["fused"] for group in build_optimizer(model("mlp"), training_config("ppo").actor.optim).param_groups
    )


def test_the_value_head_follows_the_policy_unless_told_otherwise() -> None:
    policy = small_policy(1)
    options = options_of(build_optimizer(policy, training_config("ppo", "actor.optim.lr=0.5").actor.optim), policy)
    assert {lr for lr, _ in options.values()} == {0.5}


def test_parameters_that_do_not_train_are_left_out() -> None:
    policy = small_policy(1)
    for parameter in policy.value_parameters():
        parameter.requires_grad_(False)
    options = options_of(build_optimizer(policy, training_config("ppo").actor.optim), policy)
    assert options
    assert not any(name.startswith("value_head.") for name in options)


def test_betas_and_eps() -> None:
    config = training_config("ppo", "actor.optim.adam_beta1=0.5", "actor.optim.adam_beta2=0.6").actor.optim
    for group in build_optimizer(small_policy(), config).param_groups:
        assert (group["betas"], group["eps"]) == ((0.5, 0.6), 0.001)


def test_the_value_head_trains_at_its_own_rate(mesh: DeviceMesh) -> None:
    slow, usual = (
        trained(mesh, training_config("ppo", f"actor.optim.value_lr={lr}"), 1)["weights"] for lr in ("1e-30", "0.01")
    )
    start = small_policy(1).state_dict()
    value = {name for name in start if name.startswith("value_head.")}
    assert value
    for name in start:
        assert torch.allclose(slow[name], start[name], rtol=0, atol=1e-20) == (name in value), name
        assert not torch.allclose(usual[name], start[name], rtol=0, atol=1e-20), name


def test_decay_shrinks_matrices_alone(mesh: DeviceMesh) -> None:
    """Adam's decay comes before its step: with a learning rate of 1e-30 but for the decay, lr · weight_decay = 0.1."""
    config = training_config(
        "grpo",
        "actor.optim.lr=1e-30",
        "actor.optim.weight_decay=1e29",
        "algorithm.update_epoch=1",
        "algorithm.n_minibatches=1",
    )
    got, start = trained(mesh, config, 1)["weights"], small_policy().state_dict()
    for name, tensor in start.items():
        expected = 0.9 * tensor if name.endswith(".weight") else tensor
        assert got[name].flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-6), name
    assert not same(got, start)


def test_steps_are_those_of_torchs_own_adam() -> None:
    """Its methods are called without what surrounds them for the compiler."""
    config = replace(training_config("ppo").actor.optim, weight_decay=0.1, lr=0.01)
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4)) for _ in range(2))
    policy: Any = SimpleNamespace(parameters=lambda: iter([mine]), value_parameters=list, undecayed_parameters=list)
    found = build_optimizer(policy, config)
    options: Any = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}
    expected = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, **options)
    for step in range(3):
        for parameter, optimizer in ((mine, found), (theirs, expected)):
            parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
            optimizer.zero_grad()
    assert mine.grad is None and torch.equal(mine, theirs)
    assert found.state_dict()["state"].keys() == expected.state_dict()["state"].keys()
