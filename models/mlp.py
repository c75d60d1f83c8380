"""``mlp``: a policy on the state vector, Gaussian, or categorical where actions are choices. Chunks come at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import pad

from embodied_rl.contracts import EnvObs, Trajectory
from embodied_rl.errors import UserError
from embodied_rl.models.base import (
    Evaluation,
    Policy,
    PolicyOutput,
    PolicySpec,
    Truncation,
    check_temperature,
    require_values,
)
from embodied_rl.models.categorical import chosen_logprobs, cut, draw, scaled_log_softmax
from embodied_rl.models.normalization import RunningNormalizer

_NO_CHOICE = -1e30
"""Logit of what a dimension with fewer choices than others does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpParams:
    """``model.params`` of ``mlp``."""

    hidden_size: PositiveInt = 256
    """Units of each hidden layer."""
    num_layers: PositiveInt = 2
    """Hidden layers of the policy and of the value head, each."""
    initial_log_std: float = -0.5
    """Log of the standard deviation that every action dimension starts with; learned, the same in every state."""
    normalize_observations: bool = False
    """Subtract the mean and divide by the standard deviation of the states of all rollouts so far."""


class MlpPolicy(Policy):
    """Independent over chunk steps and action dimensions: Normal(mean(state), exp(log_std)·temperature), or a
    Categorical over the choices of each dimension.

    A Normal's log-probability is that of the sample before it is clipped to [-1, 1] for the env, and the sample is what
    ``replay_inputs`` records.
    """

    Params = MlpParams
    takes_choices = True
    float32_root = True  # log_std

    def __init__(self, spec: PolicySpec, params: MlpParams) -> None:
        super().__init__()
        self.spec, self.params = spec, params
        features = self._build_inputs()
        shape, choices = (spec.num_action_chunks, spec.action_dim), spec.action_choices
        self.distribution_type = Categorical if choices else Normal
        self.truncates = bool(choices)
        outputs = spec.num_action_chunks * (sum(choices) or spec.action_dim)
        # A small last layer starts the policy near its mean, so that log_std alone sets the first exploration, or with
        # choices that are about as likely.
        self.policy = _tanh_mlp(features, outputs, params, last_gain=0.01)
        self.log_std = None if choices else nn.Parameter(torch.full(shape, params.initial_log_std))
        self.value_head = (
            _tanh_mlp(features, spec.values_per_chunk, params, last_gain=1.0) if spec.values_per_chunk else None
        )

    def _build_inputs(self) -> int:
        """Make what turns observations into the networks' input; returns the number of its features."""
        if self.spec.state_dim < 1:
            raise UserError(
                "model_type 'mlp' acts on the env's state vector and this env gives none; use a model that acts on "
                "images, such as 'tiny_vla' or 'cnn', or let the env observe its state"
            )
        self.normalizer = RunningNormalizer(self.spec.state_dim) if self.params.normalize_observations else None
        return self.spec.state_dim

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        """What of an observation is recorded."""
        return {"state": obs.state}

    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N,F] of what :meth:`_inputs` gave."""
        state = inputs["state"].to(self._device)
        return state if self.normalizer is None else self.normalizer(state)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        inputs = {name: tensor.to(self._device) for name, tensor in self._inputs(obs).items()}
        features = self._features(inputs)
        actions = self._distribution(features, temperature)
        sample = _mode(actions) if greedy else _sample(actions, self.truncation, generator)
        choices = bool(self.spec.action_choices)
        return PolicyOutput(
            actions=sample.float() if choices else sample.clamp(-1.0, 1.0),
            logprobs=_logprobs(actions, sample),
            values=self._values(features),
            replay_inputs=inputs | {"samples": sample},
            tokens=sample if choices else None,
        )

    @torch.no_grad()
    def values(self, obs: EnvObs) -> Tensor:
        return require_values(self._values(self._features(self._inputs(obs))))

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        return self._inputs(obs) | {"samples": actions.long() if self.spec.action_choices else actions}

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        features = self._features(replay_inputs)
        actions = self._distribution(features, temperature)
        names = ("logits",) if isinstance(actions, Categorical) else ("loc", "scale")
        # FSDP warns of outputs that are views.
        distribution = {name: getattr(actions, name).clone() for name in names} if with_distribution else None
        return Evaluation(
            logprobs=_logprobs(actions, replay_inputs["samples"].to(features.device)),
            entropy=actions.entropy(),
            values=self._values(features),
            distribution=distribution,
        )

    def update_statistics(self, rollouts: Sequence[Trajectory], reduce: Callable[[Tensor], Tensor]) -> None:
        if self.normalizer is not None:
            self.normalizer.update((t.replay_inputs["state"][t.valid.any(-1)] for t in rollouts), reduce)

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Also ``log_std``: decay would pull the deviation towards 1."""
        return [*super().undecayed_parameters(), *([] if self.log_std is None else [self.log_std])]

    def shard_units(self) -> list[nn.Module]:
        return [self.policy] if self.value_head is None else [self.policy, self.value_head]

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _values(self, features: Tensor) -> Tensor | None:
        return self.value_head(features).float() if self.value_head else None

    def _distribution(self, features: Tensor, temperature: float) -> Normal | Categorical:
        """Of [N,C,A]."""
        check_temperature(temperature)
        outputs, spec = self.policy(features).float(), self.spec
        if self.log_std is not None:
            mean = outputs.unflatten(-1, (spec.num_action_chunks, spec.action_dim))
            return Normal(mean, temperature * self.log_std.float().exp(), validate_args=False)
        parts = outputs.unflatten(-1, (spec.num_action_chunks, -1)).split(list(spec.action_choices), dim=-1)
        most = max(spec.action_choices)
        logits = torch.stack([pad(part, (0, most - part.shape[-1]), value=_NO_CHOICE) for part in parts], dim=-2)
        return Categorical(logits=scaled_log_softmax(logits, temperature), validate_args=False)


def _logprobs(actions: Normal | Categorical, sample: Tensor) -> Tensor:
    # Categorical.log_prob is a view.
    return actions.log_prob(sample) if isinstance(actions, Normal) else chosen_logprobs(actions.logits, sample)


def _mode(actions: Normal | Categorical) -> Tensor:
    return actions.loc if isinstance(actions, Normal) else actions.logits.argmax(-1)


def _sample(actions: Normal | Categorical, truncation: Truncation, generator: torch.Generator | None) -> Tensor:
    if isinstance(actions, Categorical):
        return draw(cut(actions.logits, truncation), generator)
    noise = torch.randn(actions.loc.shape, generator=generator, device=actions.loc.device, dtype=actions.loc.dtype)
    return actions.loc + actions.scale * noise


def _tanh_mlp(inputs: int, outputs: int, params: MlpParams, *, last_gain: float) -> nn.Sequential:
    """Orthogonal weights and zero biases, as in PPO's reference implementation (openai/baselines)."""
    widths = [inputs, *[params.hidden_size] * params.num_layers]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [orthogonal(nn.Linear(fan_in, fan_out), math.sqrt(2.0)), nn.Tanh()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(widths[-1], outputs), last_gain))


L = TypeVar("L", nn.Linear, nn.Conv2d)


def orthogonal(layer: L, gain: float) -> L:
    """The layer, with orthogonal weights and zero biases."""
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
