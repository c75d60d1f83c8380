"""``mlp``: a Gaussian policy on the state vector. Actions are those of a whole chunk, decided at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributions import Normal

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Evaluation, Policy, PolicyOutput, PolicySpec, check_temperature, require_values


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpParams:
    """``model.params`` of ``mlp``."""

    hidden_size: PositiveInt = 256
    """Units of each hidden layer."""
    num_layers: PositiveInt = 2
    """Hidden layers of the policy and of the value head, each."""
    initial_log_std: float = -0.5
    """Log of the standard deviation that every action dimension starts with; learned, the same in every state."""


class MlpPolicy(Policy):
    """Normal(mean(state), exp(log_std)·temperature), independent over chunk steps and action dimensions.

    The log-probability is that of the sample before it is clipped to [-1, 1] for the env, and the sample is what
    ``replay_inputs`` records.
    """

    Params = MlpParams
    distribution_type = Normal
    float32_root = True  # log_std

    def __init__(self, spec: PolicySpec, params: MlpParams) -> None:
        super().__init__()
        if spec.state_dim < 1:
            raise UserError(
                "model_type 'mlp' acts on the env's state vector and this env gives none; use a model that acts on "
                "images, such as 'tiny_vla', or let the env observe its state"
            )
        self.spec, self.params = spec, params
        shape = (spec.num_action_chunks, spec.action_dim)
        # A small last layer starts the policy near its mean, so that log_std alone sets the first exploration.
        self.policy = _tanh_mlp(spec.state_dim, math.prod(shape), params, last_gain=0.01)
        self.log_std = nn.Parameter(torch.full(shape, params.initial_log_std))
        self.value_head = (
            _tanh_mlp(spec.state_dim, spec.values_per_chunk, params, last_gain=1.0) if spec.values_per_chunk else None
        )

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        state = obs.state.to(self.log_std.device)
        actions = self._distribution(state, temperature)
        sample = actions.loc
        if not greedy:
            noise = torch.randn(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            sample = sample + actions.scale * noise
        return PolicyOutput(
            actions=sample.clamp(-1.0, 1.0),
            logprobs=actions.log_prob(sample),
            values=self._values(state),
            replay_inputs={"state": state, "samples": sample},
        )

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        return require_values(self._values(obs.state.to(self.log_std.device)))

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        return {"state": obs.state, "samples": actions}

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        state = replay_inputs["state"].to(self.log_std.device)
        actions = self._distribution(state, temperature)
        # FSDP warns of outputs that are views.
        distribution = {"loc": actions.loc.clone(), "scale": actions.scale.clone()} if with_distribution else None
        return Evaluation(
            logprobs=actions.log_prob(replay_inputs["samples"].to(state.device)),
            entropy=actions.entropy(),
            values=self._values(state),
            distribution=distribution,
        )

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Also ``log_std``: decay would pull the deviation towards 1."""
        return [*super().undecayed_parameters(), self.log_std]

    def shard_units(self) -> list[nn.Module]:
        return [self.policy] if self.value_head is None else [self.policy, self.value_head]

    def _values(self, state: Tensor) -> Tensor | None:
        return self.value_head(state).float() if self.value_head else None

    def _distribution(self, state: Tensor, temperature: float) -> Normal:
        """Of [N,C,A]."""
        check_temperature(temperature)
        mean = self.policy(state).float().unflatten(-1, self.log_std.shape)
        return Normal(mean, temperature * self.log_std.float().exp(), validate_args=False)


def _tanh_mlp(inputs: int, outputs: int, params: MlpParams, *, last_gain: float) -> nn.Sequential:
    """Orthogonal weights and zero biases, as in PPO's reference implementation (openai/baselines)."""
    widths = [inputs, *[params.hidden_size] * params.num_layers]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [_linear(fan_in, fan_out, math.sqrt(2.0)), nn.Tanh()]
    return nn.Sequential(*layers, _linear(widths[-1], outputs, last_gain))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
