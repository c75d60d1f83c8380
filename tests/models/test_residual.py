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
from embodied_rl.models.footprint import footprint
from embodied_rl.models.registry import build_policy, policy_of
from embodied_rl.models.residual import ResidualPolicy
from embodied_rl.models.weights.precision import hold_in
from embodied_rl.schema import ModelConfig
from embodied_rl.workers.inference import uniform
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
    for row in range(N):
        for part in range(3):
            done, planned = (t[row, 2 * part : 2 * part + 2] for t in (found.actions, medians()))
            told = 1 if torch.equal(done[0], done[1]) else 2  # the same again tells nothing new
            expected = ((done - planned) / 2.0)[:told].mean(0)
            assert torch.allclose(decided[row, part], expected, atol=1e-5)


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
    found = drawn(far)
    decided, _ = far.rsample(inputs, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(decided, far.decisions(inputs, found.actions), atol=1e-5), "as critics read what was executed"


def test_a_demonstration_is_followed_as_far_as_it_reaches(tmp_path: Path) -> None:
    policy, wanted = of(tmp_path), medians() + 0.1
    inside = policy.demonstration(observe(), wanted)["samples"].tanh()
    assert torch.allclose(inside, torch.full_like(inside, 0.4), atol=1e-5)
    beyond = policy.demonstration(observe(), medians() - 1.0)["samples"]
    assert beyond.isfinite().all()
    assert torch.allclose(beyond.tanh(), torch.full_like(beyond, -1.0), atol=2e-3)


def test_what_an_episodes_end_cuts_off_is_no_correction(tmp_path: Path) -> None:
    """Data sets repeat the last action; the base goes on."""
    policy = of(tmp_path, corrections_per_chunk=1)
    wanted = medians() + 0.1
    for valid in range(1, C):
        shown = wanted.clone()
        shown[:, valid:] = shown[:, valid - 1 : valid]
        found = policy.demonstration(observe(), shown)["samples"].tanh()
        assert torch.allclose(found, torch.full_like(found, 0.4), atol=1e-5)


def test_memory_of_a_pass_is_the_bases_too() -> None:
    with torch.device("meta"):
        mine, its = (
            footprint(build_policy(name, SPEC, params)) for name, params in (("residual", PARAMS), ("tiny_vla", BASE))
        )
    assert mine.widest >= its.widest > 0
    assert mine.saved < its.saved / 10
    assert mine.recorded < its.recorded / 10


def test_uniform_decisions_are_corrections(tmp_path: Path) -> None:
    found = uniform(of(tmp_path), observe(), seed=0)
    moved = (found.actions - medians()).unflatten(1, (3, 2))
    assert torch.allclose(moved[:, :, 0], moved[:, :, 1], atol=1e-6)
    assert 0.2 < moved.abs().max() <= 0.25 + 1e-6
    decided = moved[:, :, 0] / 0.25
    assert torch.allclose(found.replay_inputs["samples"].tanh(), decided.clamp(-0.999, 0.999), atol=1e-4)


def test_rounded_weights_without_a_tanh(tmp_path: Path) -> None:
    policy = of(tmp_path, squash=False)
    hold_in(policy, torch.bfloat16)
    assert drawn(policy).actions.isfinite().all()


def test_folders_tell_the_same_of_the_same_base(tmp_path: Path) -> None:
    """Defaults that are spelled out are no other base."""
    of(tmp_path / "base").save_pretrained(tmp_path / "own")
    again = build_policy("residual", SPEC, PARAMS | {"base_params": BASE | {"max_words": 24}}, str(tmp_path / "own"))
    again.save_pretrained(tmp_path / "again")
    build_policy("residual", SPEC, PARAMS, str(tmp_path / "again"))
    with pytest.raises(UserError, match="made with"):
        build_policy("residual", SPEC, PARAMS | {"base_params": BASE | {"max_words": 23}}, str(tmp_path / "own"))


@pytest.mark.parametrize("spread", [2.0, [2.0] * A])
def test_a_base_that_plays_its_means_is_corrected_from_there(tmp_path: Path, spread: float | list[float]) -> None:
    """`spread` is not of the base's weights, but of what it does, and of what its corrections were learnt for."""
    params = BASE | {"spread": spread}
    policy = of(tmp_path / "base", base_params=params)
    base().save_pretrained(tmp_path / "base")
    means = build_policy("tiny_vla", dataclasses.replace(SPEC, values_per_chunk=0), params, str(tmp_path / "base"))
    expected = means.act(observe(), greedy=True, temperature=1.0, generator=None).actions
    assert (expected - medians()).abs().max() > 0.02
    done = policy.act(observe(), greedy=True, temperature=1.0, generator=None)
    assert torch.allclose(done.replay_inputs["state"][:, -C * A :].unflatten(1, (C, A)), expected)
    policy.save_pretrained(tmp_path / "own")
    build_policy("residual", SPEC, PARAMS | {"base_params": params}, str(tmp_path / "own"))
    with pytest.raises(UserError, match="made with"):
        build_policy("residual", SPEC, PARAMS, str(tmp_path / "own"))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_policies_without_published_weights_may_be_the_base(name: str) -> None:
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
        ({"base": "tiny_vl"}, r"model\.params\.base: .*got 'tiny_vl'"),
        ({"base": "pi0"}, r"model\.params\.base: got 'pi0', whose layers come from a published folder"),
        ({"base": "causal_lm"}, r"model\.params\.base: got 'causal_lm'"),
        ({"base_params": {"noise_correlation": 0.5}}, r"base_params\.noise_correlation: got 0\.5, but .*leave it out"),
        ({"base_params": {"spread": 4.0, "relative_spread": 0.2}}, r"base_params\.relative_spread: got 0\.2"),
        ({"base_params": {"hidden": 3}}, r"model\.params\.base_params\.hidden: no such key.*base_params\.hidden_size"),
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
    config = ModelConfig(model_type="residual", path=None, params=PARAMS, lora=settings(rank=4))
    with pytest.raises(UserError, match="leaves its base as it is"):
        policy_of(config, SPEC)
