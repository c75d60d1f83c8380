from __future__ import annotations

import math

import pytest
import torch

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.mlp import MlpParams, MlpPolicy


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
