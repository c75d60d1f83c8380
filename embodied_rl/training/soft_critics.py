"""Critics of chunks: an ensemble in one batched product, its target networks and the temperature that goes with it."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied_rl.algorithms.soft_q import polyak
from embodied_rl.models.base import Policy
from embodied_rl.schema import SacConfig


class _Layer(nn.Module):
    """E linear layers, initialised as torch's, and where wanted a norm and ReLU after them: [E,B,I] -> [E,B,O]."""

    def __init__(self, count: int, inputs: int, outputs: int, *, hidden: bool, layer_norm: bool) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, outputs).uniform_(-bound, bound))
        self._hidden = hidden
        self.scale = nn.Parameter(torch.ones(count, 1, outputs)) if hidden and layer_norm else None
        self.shift = nn.Parameter(torch.zeros(count, 1, outputs)) if hidden and layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.baddbmm(self.bias, x, self.weight)
        if self.scale is not None and self.shift is not None:
            y = torch.addcmul(self.shift, functional.layer_norm(y, y.shape[-1:]), self.scale)
        return y.relu() if self._hidden else y


class Ensemble(nn.Module):
    """E critics of features and decisions that share nothing."""

    def __init__(self, features: int, actions: int, config: SacConfig) -> None:
        super().__init__()
        self._count = config.num_critics
        widths = [features + actions, *[config.hidden_size] * config.num_layers, 1]
        self.layers = nn.Sequential(
            *(
                _Layer(
                    self._count,
                    inputs,
                    outputs,
                    hidden=number < config.num_layers,
                    layer_norm=config.layer_norm,
                )
                for number, (inputs, outputs) in enumerate(pairwise(widths))
            )
        )

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """[E,B] of features [B,F] and decisions [B,K,A]."""
        x = torch.cat([features, actions.flatten(1)], -1)
        return self.layers(x.expand(self._count, *x.shape)).squeeze(-1)


class SoftCritics(nn.Module):
    """All that soft actor-critic trains beside the policy; so a checkpoint has it in the place of a critic."""

    @classmethod
    def of(cls, policy: Policy, config: SacConfig) -> SoftCritics:
        """Fresh critics of a policy's features and decisions, on its device."""
        device = next(policy.parameters()).device
        return cls(policy.num_features, math.prod(policy.decision_shape), config).to(device)

    def __init__(self, features: int, actions: int, config: SacConfig) -> None:
        super().__init__()
        self.online = Ensemble(features, actions, config)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.log_temperature = nn.Parameter(
            torch.tensor(math.log(config.initial_temperature)), requires_grad=config.temperature_lr is not None
        )
        self._config = config

    @property
    def temperature(self) -> Tensor:
        """[], without gradient."""
        return self.log_temperature.detach().exp()

    def fix_temperature(self) -> None:
        """After weights were loaded: one that is not trained is the configuration's."""
        if not self.log_temperature.requires_grad:
            self.log_temperature.data.fill_(math.log(self._config.initial_temperature))

    def follow(self) -> None:
        """Move the target networks towards the critics."""
        polyak(self.target.parameters(), self.online.parameters(), tau=self._config.tau)

    def value_parameters(self) -> list[nn.Parameter]:
        """What trains at a rate of its own (see :func:`~embodied_rl.training.optimizer.build_optimizer`)."""
        return [self.log_temperature]

    def undecayed_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if not name.endswith(".weight")]
