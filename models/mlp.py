"""``mlp``: a policy on the state vector, Gaussian, or categorical where actions are choices. Chunks come at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import pad, softplus

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
from embodied_rl.models.categorical import chosen_logprobs, cut, draw, entropy, scaled_log_softmax
from embodied_rl.models.normalization import RunningNormalizer
from embodied_rl.params import NOT_OF_WEIGHTS

_NO_CHOICE = -1e30
"""Logit of what a dimension with fewer choices than others does not have."""
_LOG_STD = (-20.0, 2.0)
"""Bounds of a state's logarithm of the standard deviation (arXiv:1801.01290)."""
_LARGEST = 1.0 - 1e-6
"""What a tanh gives and float32 can tell from 1: recorded actions are cut off there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpParams:
    """``model.params`` of ``mlp``."""

    hidden_size: PositiveInt = 256
    """Units of each hidden layer."""
    num_layers: PositiveInt = 2
    """Hidden layers of the policy and of the value head, each."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Of the hidden layers."""
    squash: bool = False
    """Actions are the tanh of a Gaussian whose deviation, like its mean, depends on the state, so none lies outside of
    [-1, 1]; ``algorithm.learner=sac`` needs it. false: a Gaussian that is cut off there."""
    initial_log_std: float = field(default=-0.5, metadata=NOT_OF_WEIGHTS)
    """Log of the standard deviation that every action dimension starts with; learned, without ``squash`` the same in
    every state."""
    normalize_observations: bool = False
    """Subtract the mean and divide by the standard deviation of the states of all rollouts so far."""


class MlpPolicy(Policy):
    """Independent over chunk steps and action dimensions: Normal(mean(state), exp(log_std)·temperature), its tanh
    (``squash``), or a Categorical over the choices of each dimension.

    A Normal's log-probability is that of the sample before it is clipped to [-1, 1] for the env, and the sample is what
    ``replay_inputs`` records. With ``squash`` the sample is what the tanh is taken of, and the log-probability that of
    the action.
    """

    Params = MlpParams
    takes_choices = True
    decision_inputs = ("samples",)
    sharded_methods = ("rsample",)
    float32_root = True  # log_std

    def __init__(self, spec: PolicySpec, params: MlpParams) -> None:
        super().__init__()
        self.spec, self.params = spec, params
        self.num_features = features = self._build_inputs()
        shape, choices = self.decision_shape, spec.action_choices
        if params.squash and choices:
            raise UserError(
                "model.params.squash: got true, but this env's actions are choices, which no tanh gives; set it to "
                "false, with an algorithm that takes them, such as ppo"
            )
        self.distribution_type = Categorical if choices else None if params.squash else Normal
        self.truncates, self.reparameterized = bool(choices), params.squash
        outputs = shape[0] * (sum(choices) or spec.action_dim) * (2 if params.squash else 1)
        # A small last layer starts the policy near its mean, so that log_std alone sets the first exploration, or with
        # choices that are about as likely.
        self.policy = _layers(features, outputs, params, last_gain=0.01)
        if params.squash:
            last = self.policy[-1]
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias[outputs // 2 :], params.initial_log_std)
        fixed = not choices and not params.squash
        self.log_std = nn.Parameter(torch.full(shape, params.initial_log_std)) if fixed else None
        self.value_head = (
            _layers(features, spec.values_per_chunk, params, last_gain=1.0) if spec.values_per_chunk else None
        )

    def _build_inputs(self) -> int:
        """Make what turns observations into the networks' input; returns the number of its features."""
        if self.spec.state_dim < 1:
            raise UserError(
                "model_type 'mlp' acts on the env's state vector and this env gives none; use a model that acts on "
                "images, such as 'tiny_vla' or 'cnn', or let the env observe its state"
            )
        self.normalizer = RunningNormalizer(self.spec.state_dim) if self.params.normalize_observations else None
        self.keeps_statistics = self.normalizer is not None
        return self.spec.state_dim

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._features(inputs)

    def rsample(self, inputs: Mapping[str, Tensor], *, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        actions = self._distribution(self._features(inputs), 1.0)
        sample = _sample(actions, self.truncation, generator)
        return self.decisions(inputs, self.executed(inputs, sample.tanh())), self._logprobs(actions, sample)

    def _of_actions(self, numbers: Tensor) -> Tensor:
        """[N,C,A] of what decisions have [N,K,A], with the same sum."""
        return numbers

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
        decided = sample.float() if choices else sample.tanh() if self.params.squash else sample.clamp(-1.0, 1.0)
        return PolicyOutput(
            actions=self.executed(inputs, decided),
            logprobs=self._of_actions(self._logprobs(actions, sample)),
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
        return self._inputs(obs) | {"samples": self._sample_of(actions)}

    def _sample_of(self, decided: Tensor) -> Tensor:
        """What would have to be drawn for it."""
        if self.spec.action_choices:
            return decided.long()
        return decided.clamp(-_LARGEST, _LARGEST).atanh() if self.params.squash else decided

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        features = self._features(replay_inputs)
        actions = self._distribution(features, temperature)
        if isinstance(actions, Tensor):
            parameters = {"logits": actions}
        else:
            parameters = {"loc": actions.loc, "scale": actions.scale}
        # FSDP warns of outputs that are views.
        distribution = {name: tensor.clone() for name, tensor in parameters.items()} if with_distribution else None
        samples = replay_inputs["samples"].to(features.device)
        return Evaluation(
            logprobs=self._of_actions(self._logprobs(actions, samples)),
            entropy=self._of_actions(self._entropy(actions, samples)),
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

    def _distribution(self, features: Tensor, temperature: float) -> Normal | Tensor:
        """Of [N,K,A]; where they are choices, the log-probabilities, one more dimension."""
        check_temperature(temperature)
        outputs, spec, shape = self.policy(features).float(), self.spec, self.decision_shape
        if self.params.squash:
            mean, log_std = outputs.unflatten(-1, (2, *shape)).unbind(-3)
            return Normal(mean, temperature * log_std.clamp(*_LOG_STD).exp(), validate_args=False)
        if self.log_std is not None:
            mean = outputs.unflatten(-1, shape)
            return Normal(mean, temperature * self.log_std.float().exp(), validate_args=False)
        most = max(spec.action_choices)
        if set(spec.action_choices) == {most}:
            logits = outputs.unflatten(-1, (*shape, most))
        else:
            parts = outputs.unflatten(-1, (shape[0], -1)).split(list(spec.action_choices), dim=-1)
            logits = torch.stack([pad(part, (0, most - part.shape[-1]), value=_NO_CHOICE) for part in parts], dim=-2)
        return scaled_log_softmax(logits, temperature)

    def _logprobs(self, actions: Normal | Tensor, sample: Tensor) -> Tensor:
        if isinstance(actions, Tensor):
            return chosen_logprobs(actions, sample)
        return actions.log_prob(sample) - (_log_slope(sample) if self.params.squash else 0.0)

    def _entropy(self, actions: Normal | Tensor, samples: Tensor) -> Tensor:
        if isinstance(actions, Tensor):
            return entropy(actions)
        if not self.params.squash:
            return actions.entropy()
        # No closed form: that of what the tanh is taken of, and an estimate of the rest, whose samples move with the
        # distribution, or it would have no gradient.
        noise = ((samples - actions.loc) / actions.scale).detach()
        return actions.entropy() + _log_slope(actions.loc + actions.scale * noise)


def _log_slope(x: Tensor) -> Tensor:
    """log(1 - tanh²(x)), far out, too."""
    return 2.0 * (math.log(2.0) - x - softplus(-2.0 * x))


def _mode(actions: Normal | Tensor) -> Tensor:
    return actions.argmax(-1) if isinstance(actions, Tensor) else actions.loc


def _sample(actions: Normal | Tensor, truncation: Truncation, generator: torch.Generator | None) -> Tensor:
    if isinstance(actions, Tensor):
        return draw(cut(actions, truncation), generator)
    noise = torch.randn(actions.loc.shape, generator=generator, device=actions.loc.device, dtype=actions.loc.dtype)
    return actions.loc + actions.scale * noise


def _layers(inputs: int, outputs: int, params: MlpParams, *, last_gain: float) -> nn.Sequential:
    """Orthogonal weights and zero biases, as in PPO's reference implementation (openai/baselines)."""
    widths = [inputs, *[params.hidden_size] * params.num_layers]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        activation = nn.Tanh() if params.activation == "tanh" else nn.ReLU()
        layers += [orthogonal(nn.Linear(fan_in, fan_out), math.sqrt(2.0)), activation]
    return nn.Sequential(*layers, orthogonal(nn.Linear(widths[-1], outputs), last_gain))


L = TypeVar("L", nn.Linear, nn.Conv2d)


def orthogonal(layer: L, gain: float) -> L:
    """The layer, with orthogonal weights and zero biases."""
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
