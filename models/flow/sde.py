"""Sampling from a flow-matching policy with log-probabilities: deterministic (ODE), Flow-SDE and Flow-Noise.

Time runs from t = 1 (noise) to t = 0 (actions) in K equal steps of δ = 1/K. With the velocity v = v(x, t), which points
from actions to noise, x₀ = x - vt is the denoised and x₁ = x + v(1 - t) the noisy end of the path through x. One step:

==========  ============================================  ================  =========================================
            mean                                          deviation         source
==========  ============================================  ================  =========================================
ODE         x - vδ  =  x₀(1-t+δ) + x₁(t-δ)                0                 flow matching, arXiv:2210.02747
Flow-SDE    x₀(1-t+δ) + x₁(t-δ-σ²δ/2t), σ = a√(t/(1-t))   σ√δ               Flow-GRPO, arXiv:2505.05470
Flow-Noise  x - vδ                                        learned           ReinFlow, arXiv:2505.22094
==========  ============================================  ================  =========================================

Both with the choices of π_RL (arXiv:2510.25889): at t = 1 the σ of Flow-SDE divides by 1 minus the *next* t; of its K
steps one drawn at random is stochastic and the others are ODE steps, or all are; of Flow-Noise all are.

Letters in shapes: H steps that the network predicts at once, of which C are executed; D dimensions that it predicts, of
which A are the action's; S stochastic steps (1 or K).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from embodied_rl.models.base import check_temperature

Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(x [N,H,D], t [N]) -> velocity [N,H,D], and the logarithm of the learned deviation [N,H,D] for Flow-Noise."""

STD_RANGE = (0.08, 0.16)
"""Range of Flow-Noise's learned deviation."""
TIME_ALPHA, TIME_SCALE, TIME_OFFSET = 1.5, 0.999, 0.001
"""Flow matching draws t = 0.001 + 0.999 Beta(1.5, 1) (π0, arXiv:2410.24164)."""
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowParams:
    """The part of ``model.params`` that chooses the sampler."""

    num_steps: PositiveInt = 10
    """K denoising steps."""
    noise_method: Literal["flow_sde", "flow_noise"] = "flow_sde"
    """Source of exploration: a stochastic differential equation, or a learned deviation."""
    noise_level: PositiveFloat = 0.5
    """flow_sde: a, the scale of the noise."""
    stochastic_steps: Literal["one", "all"] = "one"
    """flow_sde: whether one denoising step of each prediction is stochastic, drawn at random, or all."""
    joint_logprob: Literal["sum", "mean"] = "sum"
    """All steps stochastic: the log-likelihood of the path is the sum over K steps and the initial noise; mean divides
    it by K + 1, as RLinf does, which flattens all ratios."""

    @property
    def all_stochastic(self) -> bool:
        return self.noise_method == "flow_noise" or self.stochastic_steps == "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The denoising of actions, as far as the log-probabilities need it."""

    states: Tensor
    """[N,S+1,H,D]: before and after each stochastic step."""
    steps: Tensor
    """[N] int64: which step the first transition of ``states`` is."""
    actions: Tensor
    """[N,H,D]: the result, t = 0."""


def times(num_steps: int, device: torch.device | str | None = None) -> Tensor:
    """[K+1]: 1, 1 - 1/K, .., 0."""
    return torch.linspace(1.0, 0.0, num_steps + 1, device=device)


def noise_scales(schedule: Tensor, level: float) -> Tensor:
    """[K]: σ of Flow-SDE at the start of each step of ``schedule`` [K+1]."""
    ends = torch.where(schedule == 1.0, schedule[1], schedule)
    return level * (schedule / (1.0 - ends)).sqrt()[:-1]


def sde_mean(x: Tensor, velocity: Tensor, t: Tensor, delta: Tensor, sigma: Tensor | float) -> Tensor:
    """Mean of the next state; with σ = 0 that of the ODE. ``t``, ``delta`` and ``sigma`` broadcast to ``x``."""
    denoised, noise = x - velocity * t, x + velocity * (1.0 - t)
    return denoised * (1.0 - t + delta) + noise * (t - delta - sigma**2 * delta / (2.0 * t))


def learned_log_std(logits: Tensor) -> Tensor:
    """tanh bounds the log-variance so that the deviation is in :data:`STD_RANGE`."""
    low, high = (2.0 * math.log(bound) for bound in STD_RANGE)
    return 0.5 * (low + 0.5 * (high - low) * (logits.float().tanh() + 1.0))


def sample(
    velocity: Velocity,
    noise: Tensor,
    params: FlowParams,
    *,
    executed: tuple[int, int],
    greedy: bool,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Path, Tensor]:
    """Denoise ``noise`` [N,H,D] float32.

    Args:
        executed: (C, A), the part of a state that log-probabilities are of.
        greedy: all steps are ODE steps. The log-probabilities are those of this path under the stochastic sampler.
        temperature: scales the deviation of the stochastic steps. The initial noise and the means stay.

    Returns:
        The path, and the log-probabilities [N,C,A] that :func:`log_likelihood` gives for it.
    """
    check_temperature(temperature)
    count, device = len(noise), noise.device
    if params.all_stochastic:
        steps = torch.zeros(count, dtype=torch.long, device=device)
    else:
        steps = torch.randint(params.num_steps, (count,), generator=generator, device=device)
    x, path = noise, [noise]
    logprobs = _initial_logprob(noise, params, executed)
    for step in range(params.num_steps):
        index = torch.full((count,), step, dtype=torch.long, device=device)
        ode, mean, log_std = _step(velocity, x, index, params, temperature)
        after = ode
        drawn = torch.ones_like(steps, dtype=torch.bool) if params.all_stochastic else steps == step
        if not greedy:
            fresh = torch.randn(x.shape, generator=generator, device=device)
            after = torch.where(drawn[:, None, None], mean + log_std.exp() * fresh, ode)
        change = _normal_logprob(after, mean, log_std, executed)
        logprobs = logprobs + torch.where(drawn[:, None, None], change, 0.0)
        if params.all_stochastic:
            path.append(after)
        else:
            path = [torch.where(drawn[:, None, None], x, path[0]), torch.where(drawn[:, None, None], after, path[-1])]
        x = after
    return Path(states=torch.stack(path, 1), steps=steps, actions=x), _joint(logprobs, params)


def log_likelihood(
    velocity: Velocity,
    states: Tensor,
    steps: Tensor,
    params: FlowParams,
    *,
    executed: tuple[int, int],
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, [N,C,A] each, of the stochastic steps of a :class:`Path`.

    Steps add up, and where all are stochastic so does the initial noise. The entropy is that of the steps' normal
    distributions; with ``flow_sde`` no parameter changes it.
    """
    check_temperature(temperature)
    states = states.float()
    logprobs = _initial_logprob(states[:, 0], params, executed)
    entropy = torch.full_like(logprobs, 0.5 + _HALF_LOG_2PI if params.all_stochastic else 0.0)
    for offset in range(states.shape[1] - 1):
        _, mean, log_std = _step(velocity, states[:, offset], steps + offset, params, temperature)
        logprobs = logprobs + _normal_logprob(states[:, offset + 1], mean, log_std, executed)
        entropy = entropy + _executed(log_std.expand_as(mean), executed) + 0.5 + _HALF_LOG_2PI
    return _joint(logprobs, params), _joint(entropy, params)


def draw_time(count: int, generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """[N] times of flow matching."""
    # The distribution function of Beta(α, 1) is x^α.
    beta = torch.rand(count, generator=generator, device=device) ** (1.0 / TIME_ALPHA)
    return TIME_OFFSET + TIME_SCALE * beta


def time_embedding(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """[N] -> [N,width], float64: sines and cosines of periods in geometric progression."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=t.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = 2 * math.pi * t.double()[:, None] / period
    return torch.cat((angle.sin(), angle.cos()), 1)


def _step(
    velocity: Velocity, x: Tensor, index: Tensor, params: FlowParams, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """ODE mean, stochastic mean (both [N,H,D]) and log-deviation of the step ``index`` [N] from ``x``."""
    schedule = times(params.num_steps, x.device)
    t = schedule[index]
    v, log_std = velocity(x, t)
    t, delta = t[:, None, None], (t - schedule[index + 1])[:, None, None]
    ode = x - v * delta
    if params.noise_method == "flow_noise":
        if log_std is None:
            raise RuntimeError("flow_noise needs a velocity function with a learned deviation")
        return ode, ode, log_std + math.log(temperature)
    sigma = noise_scales(schedule, params.noise_level)[index][:, None, None]
    return ode, sde_mean(x, v, t, delta, sigma), (sigma * delta.sqrt()).log() + math.log(temperature)


def _executed(tensor: Tensor, executed: tuple[int, int]) -> Tensor:
    return tensor[:, : executed[0], : executed[1]]


def _normal_logprob(value: Tensor, mean: Tensor, log_std: Tensor, executed: tuple[int, int]) -> Tensor:
    deviation = _executed((value - mean) / log_std.exp(), executed)
    return -0.5 * deviation.square() - _executed(log_std.expand_as(mean), executed) - _HALF_LOG_2PI


def _initial_logprob(noise: Tensor, params: FlowParams, executed: tuple[int, int]) -> Tensor:
    noise = _executed(noise, executed)
    return -0.5 * noise.square() - _HALF_LOG_2PI if params.all_stochastic else torch.zeros_like(noise)


def _joint(total: Tensor, params: FlowParams) -> Tensor:
    return total / (params.num_steps + 1) if params.all_stochastic and params.joint_logprob == "mean" else total
