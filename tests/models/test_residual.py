"""Corrections of a frozen policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import build_policy, policy_of
from embodied_rl.models.residual import ResidualPolicy
from embodied_rl.schema import ModelConfig
from tests.models.small import settings

N, C, A, S = 5, 6, 2, 4
SPEC = PolicySpec(action_dim=A, num_action_chunks=C, state_dim=S, image_shapes={"front": (32, 40)}, values_per_chunk=1)
BASE: dict[str, Any] = {"hidden_size": 32, "num_layers": 2}
PARAMS: dict[str, Any] = {"base_params": BASE, "corrections_per_chunk": 3, "scale": 0.25, "hidden_size": 16}


def base() -> Policy:
    torch.manual_seed(0)
    policy = build_policy("tiny_vla", dataclasses.replace(SPEC, values_per_chunk=0), BASE)
    with torch.no_grad():  # fresh ones do much the same everywhere
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def of(folder: Path, **params: Any) -> ResidualPolicy:
    """A residual of the base that is saved there."""
    base().save_pretrained(folder)
    torch.manual_seed(1)
    policy = build_policy("residual", SPEC, PARAMS | params, str(folder))
    assert isinstance(policy, ResidualPolicy)
    return policy


def observe(n: int = N) -> EnvObs:
    drawn = torch.Generator().manual_seed(0)
    return EnvObs(
        env_ids=torch.arange(n),
        images={"front": torch.randint(0, 256, (n, 32, 40, 3), dtype=torch.uint8, generator=drawn)},
        state=torch.randn(n, S, generator=drawn),
        instructions=("push the cube",) * n,
    )


def medians() -> torch.Tensor:
    return base().act(observe(), greedy=True, temperature=1.0, generator=None).actions


def drawn(policy: Policy, seed: int = 0) -> Any:
    return policy.act(observe(), greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(seed))


def test_it_begins_with_what_the_base_does(tmp_path: Path) -> None:
    policy = of(tmp_path)
    done = policy.act(observe(), greedy=True, temperature=1.0, generator=None).actions
    assert (done - medians()).abs().max() < 0.02
    weights = base().state_dict()
    assert all(torch.equal(policy.base.state_dict()[name], tensor) for name, tensor in weights.items())
    assert {name.partition(".")[0] for name, p in policy.named_parameters() if p.requires_grad} == {
        "policy",
        "value_head",
    }


def test_a_correction_holds_for_its_part_of_the_chunk(tmp_path: Path) -> None:
    moved = drawn(of(tmp_path)).actions - medians()
    parts = moved.unflatten(1, (3, 2))
    assert torch.allclose(parts[:, :, 0], parts[:, :, 1], atol=1e-6)
    assert moved.abs().max() <= 0.25
    assert parts[:, :, 0].std() > 0.05
    assert not torch.allclose(parts[:, 0], parts[:, 1], atol=0.01)


def test_what_was_decided_follows_from_what_was_executed(tmp_path: Path) -> None:
    policy = of(tmp_path)
    found = drawn(policy)
    decided = found.replay_inputs["samples"].tanh()
    assert torch.allclose(policy.decisions(found.replay_inputs, found.actions), decided, atol=1e-5)
    near = of(tmp_path, scale=2.0)  # most are cut off at 1
    found = drawn(near)
    decided = near.decisions(found.replay_inputs, found.actions)
    assert found.actions.abs().max() == 1.0
    again = (medians() + 2.0 * decided.repeat_interleave(2, 1)).unflatten(1, (3, 2)).mean(2)
    assert torch.allclose(again, found.actions.unflatten(1, (3, 2)).mean(2), atol=1e-5)


def test_a_chunks_probability_is_that_of_its_corrections(tmp_path: Path) -> None:
    policy = of(tmp_path)
    found = drawn(policy)
    outputs = policy.policy(policy.features(found.replay_inputs)).unflatten(-1, (2, 3, A))
    tanh = TransformedDistribution(Normal(outputs[:, 0], outputs[:, 1].exp()), TanhTransform())
    expected = tanh.log_prob(found.replay_inputs["samples"].tanh())
    assert torch.allclose(found.logprobs.sum(1), expected.sum(1), atol=1e-3)
    assert torch.allclose(found.logprobs[:, ::2], expected, atol=1e-3)
    assert not found.logprobs[:, 1::2].any()
    assert not policy(found.replay_inputs, temperature=1.0).entropy[:, 1::2].any()


def test_draws_for_critics_have_a_gradient_and_keep_to_what_can_be_done(tmp_path: Path) -> None:
    policy = of(tmp_path)
    inputs = {"state": drawn(policy).replay_inputs["state"]}
    decided, logprobs = policy.rsample(inputs, generator=torch.Generator().manual_seed(0))
    assert decided.shape == logprobs.shape == (N, 3, A) == (N, *policy.decision_shape)
    assert policy.features(inputs).shape == (N, policy.num_features)
    decided.sum().backward()
    assert all(p.grad is not None for p in policy.policy.parameters())
    assert all(p.grad is None for p in policy.base.parameters())
    far = of(tmp_path, scale=2.0)
    decided, _ = far.rsample(inputs, generator=torch.Generator().manual_seed(0))
    reached = medians() + 2.0 * decided.repeat_interleave(2, 1)
    assert reached.unflatten(1, (3, 2)).mean(2).abs().max() <= 1.0 + 1e-5, "of both actions of a correction"


def test_a_demonstration_is_followed_as_far_as_it_reaches(tmp_path: Path) -> None:
    policy, wanted = of(tmp_path), medians() + 0.1
    inside = policy.demonstration(observe(), wanted)["samples"].tanh()
    assert torch.allclose(inside, torch.full_like(inside, 0.4), atol=1e-5)
    beyond = policy.demonstration(observe(), medians() - 1.0)["samples"]
    assert beyond.isfinite().all()
    assert torch.allclose(beyond.tanh(), torch.full_like(beyond, -1.0), atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_any_policy_may_be_the_base(name: str) -> None:
    spec = dataclasses.replace(SPEC, image_shapes={} if name == "mlp" else {"front": (40, 40)})
    params = PARAMS | {"base": name, "base_params": {"hidden_size": 8}}
    policy = build_policy("residual", spec, params)
    obs = observe()
    images = {camera: torch.zeros(N, *size, 3, dtype=torch.uint8) for camera, size in spec.image_shapes.items()}
    found = policy.act(
        dataclasses.replace(obs, images=images), greedy=False, temperature=1.0, generator=torch.Generator()
    )
    assert found.actions.shape == (N, C, A)
    assert found.replay_inputs["state"].shape == (N, S + C * A) == (N, policy.num_features)
    assert torch.equal(found.replay_inputs["state"][:, :S], obs.state)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"corrections_per_chunk": 4}, r"corrections_per_chunk=4: got chunks of 6 actions .*, expected a multiple"),
        ({"base": "nothing"}, "nothing"),
        ({"base_params": {"hidden": 3}}, "hidden"),
    ],
)
def test_refusals(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_policy("residual", SPEC, PARAMS | params)


def test_a_folder_of_another_base_is_refused(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"choose the model and model\.params that the weights were made with"):
        build_policy("residual", SPEC, PARAMS | {"base_params": {}}, str(tmp_path))


def test_the_base_has_no_adapters(tmp_path: Path) -> None:
    config = ModelConfig(model_type="residual", path=None, params=PARAMS, lora=settings(path=None, rank=4))
    with pytest.raises(UserError, match="leaves its base as it is"):
        policy_of(config, SPEC)
