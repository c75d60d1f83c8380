"""``residual``: corrections of a frozen policy's chunks.

::

    observation ─► base, frozen ─┬─ what it saw [F] ──┐
                                 └─ its chunk [C,A] ──┴─► MLP ─► K corrections [K,A] in [-1, 1]
                                           │                           │ × scale, each for C/K actions
                                           └────────────── + ──────────┘ ─► chunk, cut off at [-1, 1]

The base acts without sampling, so what is tried lies around what it would do, which in a policy that imitates succeeds
far more often than its samples do. What is recorded of pictures is what the base made of them, some hundred numbers: a
replay buffer (``algorithm.learner=sac``) holds as many as of states, and an update never runs the base. Corrections of
bounded size after *Policy Decorator* (arXiv:2412.13630), by PPO after *ResiP* (arXiv:2407.16677).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import pad

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.mlp import MlpParams, MlpPolicy
from embodied_rl.models.normalization import RunningNormalizer
from embodied_rl.models.registry import build_policy, policy_class
from embodied_rl.models.weights import folder as pretrained
from embodied_rl.models.weights.look import CONFIG_FILE, read_json
from embodied_rl.params import NOT_OF_WEIGHTS, parse_params

_FARTHEST = 0.999
"""The largest correction that a demonstration asks for: the inverse of a tanh has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualParams(MlpParams):
    """``model.params`` of ``residual``. Those of ``mlp`` are of what corrects; ``model.path`` is the base's folder of
    weights, or one of a residual."""

    base: str = "tiny_vla"
    """``model_type`` of the policy that is corrected: one that can be built without published weights."""
    base_params: dict[str, Any] = field(default_factory=dict)
    """Its ``model.params``; what is left out has its default."""
    scale: Annotated[float, Field(gt=0, le=2)] = 0.2
    """The largest correction of an action."""
    corrections_per_chunk: PositiveInt = 1
    """K: a correction holds for C/K actions, so a chunk is moved as a whole, or in so many parts."""
    activation: Literal["tanh", "relu"] = "relu"
    squash: bool = True


class ResidualPolicy(MlpPolicy):
    """The chunk of a policy that stays as it is, plus ``scale`` times what an ``mlp`` would do.

    A correction's log-probability and entropy are those of its first action, the others' are 0: sums over a chunk are
    those of what was decided.

    Raises:
        UserError: a base that cannot be, or a chunk that the corrections do not divide.
    """

    Params = ResidualParams
    needs_weights = True
    takes_choices = False
    float32_root = False  # or the base's would be, too
    sharded_methods = ("rsample", "demonstration")
    params: ResidualParams

    def __init__(self, spec: PolicySpec, params: ResidualParams) -> None:
        base_params = _of_base(params)
        super().__init__(spec, dataclasses.replace(params, base_params=base_params))
        self.distribution_type = None  # over [N,K,A], where one over [N,C,A] is asked for

    @classmethod
    def from_pretrained(cls, path: str, spec: PolicySpec, params: Any) -> Self:
        """With the weights of a residual's folder, or fresh corrections of a base with those of its own."""
        policy = cls(spec, params)
        if read_json(Path(path) / CONFIG_FILE).get("policy") == cls.__name__:
            pretrained.read(policy, policy.params, Path(path))
        else:
            policy.base = _frozen(policy.params, policy.base.spec, path)
        return policy

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """What would correct the base's chunks to ``actions``, as far as ``scale`` reaches."""
        inputs = self._inputs(obs)
        return inputs | {"samples": self._sample_of(self.decisions(inputs, actions).clamp(-_FARTHEST, _FARTHEST))}

    def decisions(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """The corrections, or what is left of them where actions were cut off: the mean over those that a correction
        reached, but for repetitions of the one before, with which data sets fill up what an episode's end cuts off."""
        actions = actions.to(self._device)
        given = (actions - self._base_chunks(inputs)) / self.params.scale
        new = torch.ones(actions.shape[:2], device=actions.device, dtype=actions.dtype)
        new[:, 1:] = (actions[:, 1:] != actions[:, :-1]).any(-1)
        parts = (self.params.corrections_per_chunk, self._held)
        given, new = given.unflatten(1, parts), new.unflatten(1, parts).unsqueeze(-1)
        new[:, :, 0] = 1.0
        return (given * new).sum(2) / new.sum(2)

    def shard_units(self) -> list[nn.Module]:
        return [*self.base.shard_units(), *super().shard_units()]

    def adapter_root(self) -> nn.Module:
        raise UserError("model.lora: model_type 'residual' leaves its base as it is; give the base itself adapters")

    def _build_inputs(self) -> int:
        spec, params = self.spec, self.params
        chunk, count = spec.num_action_chunks, params.corrections_per_chunk
        if chunk % count:
            raise UserError(
                f"model.params.corrections_per_chunk={count}: got chunks of {chunk} actions (model.num_action_chunks), "
                "expected a multiple"
            )
        self.base = _frozen(params, dataclasses.replace(spec, values_per_chunk=0))
        features = self.base.num_summary + chunk * spec.action_dim
        self.normalizer = RunningNormalizer(features) if params.normalize_observations else None
        return features

    @property
    def decision_shape(self) -> tuple[int, int]:
        return self.params.corrections_per_chunk, self.spec.action_dim

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        """In the place of a state: what the base saw, and its chunk."""
        with torch.no_grad():
            seen, actions = self.base.summarize(obs)
        return {"state": torch.cat([seen.float().to(actions.device), actions.float().flatten(1)], -1)}

    def executed(self, inputs: Mapping[str, Tensor], decisions: Tensor) -> Tensor:
        """The base's chunks, corrected."""
        held = decisions.to(self._device).repeat_interleave(self._held, 1)
        return (self._base_chunks(inputs) + self.params.scale * held).clamp(-1.0, 1.0)

    def _of_actions(self, numbers: Tensor) -> Tensor:
        return pad(numbers.unsqueeze(2), (0, 0, 0, self._held - 1)).flatten(1, 2).clone()  # FSDP warns of views

    def _base_chunks(self, inputs: Mapping[str, Tensor]) -> Tensor:
        chunks = inputs["state"][:, self.base.num_summary :]
        return chunks.to(self._device).unflatten(1, (-1, self.spec.action_dim))

    @property
    def _held(self) -> int:
        """Actions that a correction reaches."""
        return self.spec.num_action_chunks // self.params.corrections_per_chunk


def _frozen(params: ResidualParams, spec: PolicySpec, path: str | None = None) -> Any:
    return build_policy(params.base, spec, params.base_params, path).requires_grad_(False)


def _of_base(params: ResidualParams) -> dict[str, Any]:
    """Those of ``base_params`` that are not the defaults, so that folders tell the same of the same base.

    Raises:
        UserError: no such base, one that needs published weights, or a parameter that it does not have, or on which
            neither its weights nor its greedy actions depend.
    """
    try:
        base = policy_class(params.base)
    except UserError as error:
        raise UserError(f"model.params.base: {error}") from error
    if base.loading_keys:
        raise UserError(
            f"model.params.base: got {params.base!r}, whose layers come from a published folder, which a residual's "
            "own would not hold; expected tiny_vla, mlp, cnn or a policy of your own"
        )
    own = parse_params(base.Params, params.base_params, "model.params.base_params")
    changed = [
        option
        for option in dataclasses.fields(own)
        if option.name in params.base_params and getattr(own, option.name) != option.default
    ]
    for option in changed:
        if option.metadata == NOT_OF_WEIGHTS:
            raise UserError(
                f"model.params.base_params.{option.name}: got {params.base_params[option.name]}, but a residual's base "
                "acts without sampling and is not trained, so nothing would read it; leave it out"
            )
    return {option.name: params.base_params[option.name] for option in changed}
