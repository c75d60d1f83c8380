from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.models.flow import sde as flow
from embodied_rl.models.flow.sde import FlowParams

N, H, D, C, A = 6, 4, 3, 2, 2
EXECUTED = (C, A)
SAMPLERS = {
    "sde": FlowParams(num_steps=5, noise_level=0.5),
    "sde_all": FlowParams(num_steps=5, noise_level=0.7, stochastic_steps="all"),
    "noise": FlowParams(num_steps=5, noise_method="flow_noise"),
    "noise_mean": FlowParams(num_steps=5, noise_method="flow_noise", joint_logprob="mean"),
}


def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Any smooth function of both, and a deviation."""
    return (x.sin() + t[:, None, None] * x - 0.3), flow.learned_log_std(x.cos() * 2)


def draw(
    params: FlowParams, *, seed: int = 0, greedy: bool = False, temperature: float = 1.0, count: int = N
) -> tuple[flow.Path, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((count, H, D), generator=torch.Generator().manual_seed(99))
    return flow.sample(
        velocity,
        noise,
        params,
        executed=EXECUTED,
        greedy=greedy,
        temperature=temperature,
        generator=generator,
    )


def score(path: flow.Path, params: FlowParams, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    return flow.log_likelihood(velocity, path.states, path.steps, params, executed=EXECUTED, temperature=temperature)


def reference(states: np.ndarray, steps: np.ndarray, params: FlowParams, temperature: float) -> np.ndarray:
    """The formulas once more, one number at a time, in float64."""
    steps_of = range(params.num_steps) if params.all_stochastic else range(1)
    total = np.zeros((len(states), C, A))
    for n in range(len(states)):
        for c in range(C):
            for a in range(A):
                terms = []
                if params.all_stochastic:
                    terms.append(-0.5 * states[n, 0, c, a] ** 2 - 0.5 * math.log(2 * math.pi))
                for index in steps_of:
                    x, after = states[n, index, c, a], states[n, index + 1, c, a]
                    k = index if params.all_stochastic else int(steps[n])
                    t, delta = 1 - k / params.num_steps, 1 / params.num_steps
                    v = math.sin(x) + t * x - 0.3
                    if params.noise_method == "flow_noise":
                        low, high = math.log(0.08**2), math.log(0.16**2)
                        log_variance = low + (high - low) * (math.tanh(2 * math.cos(x)) + 1) / 2
                        mean, std = x - v * delta, math.exp(log_variance / 2)
                    else:
                        divisor = 1 - (t if k else t - delta)
                        sigma = params.noise_level * math.sqrt(t / divisor)
                        x0, x1 = x - v * t, x + v * (1 - t)
                        mean = x0 * (1 - t + delta) + x1 * (t - delta - sigma**2 * delta / (2 * t))
                        std = sigma * math.sqrt(delta)
                    std *= temperature
                    terms.append(-0.5 * ((after - mean) / std) ** 2 - math.log(std * math.sqrt(2 * math.pi)))
                total[n, c, a] = sum(terms) / (len(terms) if params.joint_logprob == "mean" else 1)
    return total


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("greedy", [False, True])
def test_log_probabilities_are_those_of_the_formulas(name: str, temperature: float, greedy: bool) -> None:
    params = SAMPLERS[name]
    path, logprobs = draw(params, temperature=temperature, greedy=greedy)
    expected = reference(path.states.double().numpy(), path.steps.numpy(), params, temperature)
    assert np.allclose(logprobs, expected, atol=2e-4)
    again, _ = score(path, params, temperature)
    assert torch.allclose(again, logprobs, atol=1e-5)
    assert not torch.allclose(score(path, params, 2 * temperature)[0], logprobs, atol=1e-2)


def test_noise_scales_by_hand() -> None:
    """a = .5 and K = 4: .5·√(t/(1-t)) at t = 1, .75, .5, .25, the first divided by 1 - .75."""
    scales = flow.noise_scales(flow.times(4), 0.5)
    assert torch.allclose(scales, torch.tensor([1.0, 0.5 * math.sqrt(3), 0.5, 0.5 / math.sqrt(3)]))
    assert torch.equal(flow.times(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))
    assert torch.equal(flow.noise_scales(flow.times(1), 0.5), torch.tensor([0.5]))


@settings(deadline=None)
@given(
    x=st.floats(-5, 5),
    v=st.floats(-5, 5),
    t=st.floats(0.05, 1.0),
    part=st.floats(0.01, 1.0),
)
def test_without_noise_the_stochastic_mean_is_the_ode_step(x: float, v: float, t: float, part: float) -> None:
    delta = torch.tensor(t * part, dtype=torch.float64)
    state, velocity_there, time = (torch.tensor(n, dtype=torch.float64) for n in (x, v, t))
    mean = flow.sde_mean(state, velocity_there, time, delta, 0.0)
    assert mean.item() == pytest.approx(x - v * t * part, abs=1e-9)


def test_the_learned_deviation_stays_in_its_range() -> None:
    std = flow.learned_log_std(torch.tensor([-50.0, 0.0, 50.0])).exp()
    assert torch.allclose(std, torch.tensor([0.08, math.sqrt(0.08 * 0.16), 0.16]))


def test_one_step_is_stochastic_and_the_others_follow_the_ode() -> None:
    params = SAMPLERS["sde"]
    path, _ = draw(params, count=200)
    assert path.states.shape == (200, 2, H, D)
    assert set(path.steps.tolist()) == set(range(5))
    schedule = flow.times(5)
    noise = torch.randn((200, H, D), generator=torch.Generator().manual_seed(99))
    for n in range(20):
        k = int(path.steps[n])
        x = noise[n : n + 1]
        for step in range(k):
            x = x - velocity(x, schedule[step : step + 1])[0] / 5
        assert torch.allclose(x[0], path.states[n, 0], atol=1e-5)
        ode = x - velocity(x, schedule[k : k + 1])[0] / 5
        assert not torch.allclose(ode[0], path.states[n, 1], atol=1e-3)
        x = path.states[n : n + 1, 1]
        for step in range(k + 1, 5):
            x = x - velocity(x, schedule[step : step + 1])[0] / 5
        assert torch.allclose(x[0], path.actions[n], atol=1e-5)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_greedy_follows_the_ode_whatever_the_generator(name: str) -> None:
    first, _ = draw(SAMPLERS[name], greedy=True, seed=1)
    second, _ = draw(SAMPLERS[name], greedy=True, seed=2)
    assert torch.equal(first.actions, second.actions)
    x = torch.randn((N, H, D), generator=torch.Generator().manual_seed(99))
    for t in flow.times(5)[:-1]:
        x = x - velocity(x, t.expand(N))[0] / 5
    assert torch.allclose(first.actions, x, atol=1e-5)
    assert torch.equal(draw(SAMPLERS[name], seed=1)[0].actions, draw(SAMPLERS[name], seed=1)[0].actions)
    assert not torch.allclose(draw(SAMPLERS[name], seed=1)[0].actions, first.actions, atol=1e-3)


def test_a_path_of_all_steps_is_the_sum_of_its_steps_and_its_noise() -> None:
    total, entropy = score(draw(SAMPLERS["noise"])[0], SAMPLERS["noise"])
    mean, mean_entropy = score(draw(SAMPLERS["noise"])[0], SAMPLERS["noise_mean"])
    assert torch.allclose(total, 6 * mean, atol=1e-5)
    assert torch.allclose(entropy, 6 * mean_entropy, atol=1e-5)


@pytest.mark.parametrize("name", ["sde", "sde_all", "noise"])
def test_samples_have_the_probabilities_they_report(name: str) -> None:
    """The mean of -log p is the entropy."""
    params = SAMPLERS[name]
    path, logprobs = draw(params, count=2000, temperature=0.7)
    entropy = score(path, params, 0.7)[1]
    surprise = -logprobs
    assert (surprise - entropy).mean().abs() < 4 * surprise.std() / surprise.numel() ** 0.5


def gaussian_velocity(mean: float, std: float) -> flow.Velocity:
    """Of the flow from N(0,1) to N(mean, std²): E[noise - action | x]."""

    def of(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        t = t[:, None, None]
        gain = (x - (1 - t) * mean) / (t**2 + (1 - t) ** 2 * std**2)
        return t * gain - (mean + (1 - t) * std**2 * gain), None

    return of


def moments(params: FlowParams, *, greedy: bool) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((40000, 1, 1), generator=generator)
    path, _ = flow.sample(
        gaussian_velocity(0.7, 0.3),
        noise,
        params,
        executed=(1, 1),
        greedy=greedy,
        temperature=1.0,
        generator=generator,
    )
    return path.actions.mean().item(), path.actions.std().item()


def test_the_ode_converges_to_the_target() -> None:
    errors = []
    for num_steps in (10, 20, 40, 80):
        mean, std = moments(FlowParams(num_steps=num_steps), greedy=True)
        assert mean == pytest.approx(0.7, abs=0.01)
        errors.append(abs(std - 0.3))
    # First order: eight times the steps, about an eighth of the error. The sample of the noise is good for ± .002.
    assert errors[-1] < 0.01
    assert errors[0] > 4 * errors[-1]


def test_the_stochastic_sampler_keeps_the_marginals() -> None:
    """In the limit of many steps; with all of them stochastic and with one."""
    for params in (FlowParams(num_steps=100, stochastic_steps="all"), FlowParams(num_steps=100)):
        mean, std = moments(params, greedy=False)
        assert mean == pytest.approx(0.7, abs=0.01)
        assert std == pytest.approx(0.3, abs=0.01)
    # Few steps narrow it: known, and the price of speed.
    assert moments(FlowParams(num_steps=4, stochastic_steps="all"), greedy=False)[1] < 0.28


def test_drawn_times_are_those_of_the_published_distribution() -> None:
    times = flow.draw_time(40000, torch.Generator().manual_seed(0), "cpu")
    assert times.min() >= 0.001
    assert times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.001 + 0.999 * 0.6, abs=0.005)
    assert (times < 0.5).float().mean().item() == pytest.approx(0.5**1.5, abs=0.01)


def test_a_temperature_is_above_zero() -> None:
    with pytest.raises(ValueError, match="greedy=True takes the mode"):
        draw(SAMPLERS["sde"], temperature=0.0)


def test_time_embedding_by_hand() -> None:
    """Periods .004 and 4 at width 4."""
    t = 0.3
    expected = [math.sin(2 * math.pi * t / 0.004), math.sin(2 * math.pi * t / 4.0)]
    expected += [math.cos(2 * math.pi * t / 0.004), math.cos(2 * math.pi * t / 4.0)]
    got = flow.time_embedding(torch.tensor([t], dtype=torch.float64), 4, 0.004, 4.0)
    assert got[0].tolist() == pytest.approx(expected, abs=1e-9)
