from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.algorithms.losses import full_kl
from embodied_rl.contracts import EnvObs, Trajectory
from embodied_rl.models.base import PolicyOutput, PolicySpec
from embodied_rl.models.mlp import MlpParams, MlpPolicy
from embodied_rl.models.registry import build_policy
from tests.models.small import MODELS


def policy(log_std: float) -> tuple[MlpPolicy, EnvObs]:
    spec = PolicySpec(action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={}, values_per_chunk=0)
    obs = EnvObs(env_ids=torch.arange(64), images={}, state=torch.randn(64, 4), instructions=("",) * 64)
    return MlpPolicy(spec, MlpParams(hidden_size=16, initial_log_std=log_std)), obs


def test_logprob_and_entropy_are_those_of_the_normal_distribution() -> None:
    model, obs = policy(log_std=0.5)
    generator = torch.Generator().manual_seed(0)
    decided = model.act(obs, greedy=False, temperature=1.5, generator=generator)
    mean = model.policy(obs.state).view(64, 3, 2)
    normal = torch.distributions.Normal(mean, math.exp(0.5) * 1.5)
    samples = decided.replay_inputs["samples"]
    assert torch.allclose(decided.logprobs, normal.log_prob(samples), atol=1e-5)
    assert torch.allclose(model(decided.replay_inputs, temperature=1.5).entropy, normal.entropy(), atol=1e-5)


def test_the_env_gets_the_clipped_sample_and_the_replay_the_raw_one() -> None:
    model, obs = policy(log_std=1.0)
    decided = model.act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(0))
    samples = decided.replay_inputs["samples"]
    assert samples.abs().max() > 1.0
    assert torch.equal(decided.actions, samples.clamp(-1, 1))


def test_greedy_takes_the_mode() -> None:
    model, obs = policy(log_std=0.0)
    decided = model.act(obs, greedy=True, temperature=1.0, generator=None)
    assert torch.equal(decided.replay_inputs["samples"], model.policy(obs.state).view(64, 3, 2))


def test_fresh_means_are_near_zero() -> None:
    model, obs = policy(log_std=-0.5)
    assert model.act(obs, greedy=True, temperature=1.0, generator=None).actions.abs().max() < 0.1


@pytest.mark.timeout(20)
def test_it_learns_a_linear_controller() -> None:
    torch.manual_seed(0)
    model, obs = policy(log_std=-0.5)
    target = (0.3 * obs.state[:, :2]).unsqueeze(1).expand(-1, 3, -1).contiguous()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = -model({"state": obs.state, "samples": target}, temperature=1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    greedy = model.act(obs, greedy=True, temperature=1.0, generator=None).replay_inputs["samples"]
    assert (greedy - target).abs().mean() < 0.05


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("log_std", [-0.5, 1.0])
def test_the_entropy_of_squashed_actions_has_the_gradient_of_the_policys_own(model: str, log_std: float) -> None:
    """That of -log π of draws with a gradient; a deviation of e, squashed, has less entropy the larger it gets."""
    torch.manual_seed(0)
    spec, params = MODELS[model]
    squashed = build_policy(model, spec, {**params, "squash": True, "initial_log_std": log_std})
    assert isinstance(squashed, MlpPolicy)
    draws = 2048
    obs = EnvObs(
        env_ids=torch.arange(draws),
        images={
            camera: torch.randint(0, 256, (1, *shape, 3), dtype=torch.uint8).expand(draws, -1, -1, -1)
            for camera, shape in spec.image_shapes.items()
        },
        state=torch.randn(1, 4).expand(draws, 4),
        instructions=("",) * draws,
    )
    decided = squashed.act(obs, greedy=False, temperature=1.0, generator=torch.Generator().manual_seed(1))
    _, logprobs = squashed.rsample(decided.replay_inputs, generator=torch.Generator().manual_seed(1))
    weights = [*squashed.policy.parameters()]
    found = torch.autograd.grad(squashed(decided.replay_inputs, temperature=1.0).entropy.mean(), weights)
    expected = torch.autograd.grad(-logprobs.mean(), weights)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    deviations = found[-1][len(found[-1]) // 2 :]
    assert (deviations > 0).all() if log_std < 0 else (deviations < 0).all()


def chooser(**params: Any) -> tuple[MlpPolicy, EnvObs]:
    """Three choices in one dimension and two in the other, for each of two steps."""
    torch.manual_seed(0)
    spec = PolicySpec(
        action_dim=2, num_action_chunks=2, state_dim=4, image_shapes={}, values_per_chunk=1, action_choices=(3, 2)
    )
    model = MlpPolicy(spec, MlpParams(hidden_size=16, **params))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    obs = EnvObs(env_ids=torch.arange(64), images={}, state=torch.randn(64, 4), instructions=("",) * 64)
    return model, obs


def tokens(decided: PolicyOutput) -> torch.Tensor:
    assert decided.tokens is not None
    return decided.tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_choices_have_the_probabilities_of_their_logits(temperature: float) -> None:
    model, obs = chooser()
    decided = model.act(obs, greedy=False, temperature=temperature, generator=torch.Generator().manual_seed(0))
    logits = model.policy(obs.state).view(64, 2, 5) / temperature
    parts = [torch.distributions.Categorical(logits=part) for part in (logits[..., :3], logits[..., 3:])]
    samples = decided.replay_inputs["samples"]
    assert (samples.dtype, decided.actions.dtype, samples.shape) == (torch.int64, torch.float32, (64, 2, 2))
    assert torch.equal(decided.actions, samples.float())
    assert torch.equal(tokens(decided), samples)
    expected = torch.stack([part.log_prob(samples[..., i]) for i, part in enumerate(parts)], -1)
    torch.testing.assert_close(decided.logprobs, expected, atol=1e-5, rtol=1e-5)
    evaluation = model.evaluate(decided.replay_inputs, temperature=temperature, with_distribution=True)
    torch.testing.assert_close(evaluation.logprobs, decided.logprobs)
    torch.testing.assert_close(evaluation.entropy, torch.stack([part.entropy() for part in parts], -1))
    assert evaluation.distribution is not None and model.distribution_type is not None
    divergence = full_kl(model.distribution_type, evaluation.distribution, evaluation.distribution)
    assert torch.equal(divergence, torch.zeros(64, 2, 2))


def test_a_choice_that_a_dimension_lacks_is_never_drawn_and_greedy_takes_the_likeliest() -> None:
    model, obs = chooser()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([tokens(model.act(obs, greedy=False, temperature=5.0, generator=generator)) for _ in range(50)])
    assert (drawn[..., 0].unique().tolist(), drawn[..., 1].unique().tolist()) == ([0, 1, 2], [0, 1])
    greedy = tokens(model.act(obs, greedy=True, temperature=1.0, generator=None))
    logits = model.policy(obs.state).view(64, 2, 5)
    assert torch.equal(greedy, torch.stack([logits[..., :3].argmax(-1), logits[..., 3:].argmax(-1)], -1))


def test_fresh_choices_are_about_as_likely() -> None:
    spec = PolicySpec(
        action_dim=1, num_action_chunks=1, state_dim=4, image_shapes={}, values_per_chunk=0, action_choices=(4,)
    )
    obs = EnvObs(env_ids=torch.arange(8), images={}, state=torch.randn(8, 4), instructions=("",) * 8)
    decided = MlpPolicy(spec, MlpParams()).act(obs, greedy=False, temperature=1.0, generator=None)
    assert (decided.logprobs - math.log(0.25)).abs().max() < 0.1


def test_a_demonstrated_choice_is_imitated() -> None:
    model, obs = chooser()
    target = torch.stack([(obs.state[:, 0] > 0) * 2.0, (obs.state[:, 1] > 0) * 1.0], -1).unsqueeze(1).expand(-1, 2, -1)
    inputs = model.demonstration(obs, target.contiguous())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = -model(inputs, temperature=1.0).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    greedy = model.act(obs, greedy=True, temperature=1.0, generator=None).actions
    assert (greedy == target).float().mean() > 0.95


def rollout_of(state: torch.Tensor, valid: torch.Tensor) -> Trajectory:
    """[T,N,S] states."""
    t, n = valid.shape[:2]
    nothing = torch.zeros(t, n, 2, dtype=torch.bool)
    return Trajectory(
        env_ids=torch.arange(n),
        group_ids=torch.arange(n),
        rollout_epoch=0,
        rewards=torch.zeros(t, n, 2),
        scores=torch.zeros(n),
        terminated=nothing,
        truncated=nothing,
        valid=valid,
        logprobs=torch.zeros(t, n, 2, 2),
        values=None,
        bootstrap_values=None,
        replay_inputs={"state": state},
        policy_versions=torch.zeros(t, n, dtype=torch.int64),
    )


def test_observations_are_normalised_by_what_rollouts_saw_once_they_were_trained_on() -> None:
    model, obs = chooser(normalize_observations=True)
    plain, _ = chooser()
    before = model.act(obs, greedy=True, temperature=1.0, generator=None)
    torch.testing.assert_close(before.logprobs, plain.act(obs, greedy=True, temperature=1.0, generator=None).logprobs)
    state = 3 * torch.randn(5, 6, 4) + 2
    valid = torch.rand(5, 6, 2) < 0.7
    model.update_statistics([rollout_of(state, valid)], lambda sums: sums)
    seen = state[valid.any(-1)]
    scaled = (obs.state - seen.mean(0)) / seen.std(0, correction=0)
    expected = plain.act(replace(obs, state=scaled), greedy=True, temperature=1.0, generator=None)
    after = model.act(obs, greedy=True, temperature=1.0, generator=None)
    torch.testing.assert_close(after.logprobs, expected.logprobs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after.values, expected.values, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(after.logprobs, before.logprobs)
    copy, _ = chooser(normalize_observations=True)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy.act(obs, greedy=True, temperature=1.0, generator=None).logprobs, after.logprobs)
    assert not [name for name in plain.state_dict() if "normalizer" in name], "checkpoints without stay as they were"
