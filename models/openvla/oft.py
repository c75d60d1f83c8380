"""``openvla_oft``: OpenVLA with parallel decoding (Kim, Finn, Liang 2025, arXiv:2502.19645).

::

    BOS | patches of 1 or 2 images | proprioception | prompt … 29871 | C·A slots of zeros | </s>
                                                                 └► 1 └► 2 … └► C·A: logits, or an L1 head

All tokens see all others. The action head is either the language model's own, with 256 tokens for each of C·A
actions, or a regression trained with the absolute error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Evaluation, PolicyOutput, PolicySpec
from embodied_rl.models.openvla.files import find_part, read_part
from embodied_rl.models.openvla.inputs import EOS
from embodied_rl.models.openvla.network import L1ActionHead, Mlp
from embodied_rl.models.openvla.policy import OpenVlaBase, OpenVlaParams
from embodied_rl.models.openvla.tiny import write_tiny
from embodied_rl.models.weights.folder import check_fit
from embodied_rl.models.weights.loading import AS_IT_IS, Loading


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaOftParams(OpenVlaParams):
    """``model.params`` of ``openvla_oft``."""

    action_head: Literal["discrete", "l1"] | None = None
    """``discrete`` for RL; ``l1`` is deterministic: for evaluation and imitation. null: ``l1`` where the folder has an
    ``action_head`` file."""
    use_proprio: bool | None = None
    """Show the network the env's state; null: where the folder has a ``proprio_projector`` file."""
    cameras: tuple[str, ...] = ("agentview",)
    """As many as the checkpoint was trained with, in its order."""
    keep_stop_token: bool = True
    """Put </s> after the slots, as in training by imitation; checkpoints from RLinf were trained without."""


class OpenVlaOftPolicy(OpenVlaBase):
    """Discrete: categorical over 256 tokens for each of C·A actions; ``replay_inputs`` have ``tokens`` [N,C,A] int64,
    ids of the vocabulary. With the L1 head: no distribution; ``targets`` [N,C,A] are normalised actions, and their
    log-probability is minus the absolute error (a Laplace density up to a constant), whatever the temperature.

    With proprioception they have ``proprio`` [N,S], normalised.
    """

    Params = OpenVlaOftParams
    name: ClassVar[str] = "openvla_oft"
    params: OpenVlaOftParams

    def __init__(
        self,
        spec: PolicySpec,
        params: OpenVlaOftParams,
        folder: Path | None = None,
        loading: Loading = AS_IT_IS,
    ) -> None:
        if not params.cameras or len(set(params.cameras)) < len(params.cameras):
            raise UserError(f"model.params.cameras: got {list(params.cameras)}, expected at least one, each once")
        super().__init__(spec, params, folder, params.cameras, loading)
        assert folder is not None  # else the base class would have said so
        self.num_slots = spec.num_action_chunks * spec.action_dim
        width = self.network.width
        self.proprio_projector: Mlp | None = None
        if _wanted(params.use_proprio, folder, "proprio_projector"):
            if self.codec.state_dim != spec.state_dim:
                raise UserError(
                    f"model.path={folder}: its statistics are of {self.codec.state_dim or 'no'} proprioceptive "
                    f"dimensions and the env's state has {spec.state_dim}; set model.params.use_proprio=false, or use "
                    "another checkpoint"
                )
            self.proprio_projector = Mlp(spec.state_dim, width, width)
        self.action_head: L1ActionHead | None = None
        if _wanted(None if params.action_head is None else params.action_head == "l1", folder, "action_head"):
            self.action_head = L1ActionHead(width, spec.action_dim)
            self.truncates = False
            self.network.language_model.lm_head.requires_grad_(False)
        for name, part in self._parts().items():
            state = read_part(folder, name)
            check_fit(part.state_dict(), state, f"model.path={folder}: {name}")
            part.load_state_dict(state)
            part.to(self.dtype)

    @classmethod
    def write_tiny(cls, directory: Path, *, with_l1_head: bool = False) -> None:
        """Write a small checkpoint for LIBERO and the dummy env, with random weights, for tests and trials.

        Args:
            with_l1_head: with the files of L1 head and proprioception (LIBERO's).
        """
        write_tiny(directory, with_l1_head=with_l1_head)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        inputs = self._inputs(obs)
        if self.action_head is not None and not greedy:
            raise UserError(
                "model.params.action_head: the L1 head of this checkpoint is deterministic, so there is nothing to "
                "sample and no probability for RL; use a checkpoint with discrete actions (action_head=discrete) for "
                "RL, and temperature 0 to evaluate this one"
            )
        states = self._states(inputs)
        values = self._value_of(states[:, 0, 0])
        if self.action_head is not None:
            normalized = self._regressed(states)
            return PolicyOutput(
                actions=self.codec.to_env(normalized),
                logprobs=torch.zeros_like(normalized),
                values=values,
                replay_inputs={**inputs, "targets": normalized},
            )
        log_probabilities = self._log_probabilities(states, temperature)
        tokens = self._choose(log_probabilities, greedy=greedy, generator=generator)
        return self._output(inputs, tokens, self._pick(log_probabilities, tokens), values)

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        if self.action_head is None:
            return super().evaluate(replay_inputs, temperature=temperature, with_distribution=with_distribution)
        if with_distribution:
            raise RuntimeError("openvla_oft: an L1 head has no distribution")
        states = self._states(replay_inputs)
        normalized = self._regressed(states)
        errors = (normalized - replay_inputs["targets"].to(normalized)).abs()
        return Evaluation(logprobs=-errors, entropy=torch.zeros_like(errors), values=self._value_of(states[:, 0, 0]))

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        if self.action_head is None:
            return super().demonstration(obs, actions)
        return {**self._inputs(obs), "targets": self.codec.from_env(actions.to(self.network.device))}

    def unread_modules(self) -> list[nn.Module]:
        head = [] if self.action_head is None else [self.network.language_model.lm_head]
        return [*super().unread_modules(), *head]

    def _inputs(self, obs: EnvObs) -> dict[str, Tensor]:
        inputs = super()._inputs(obs)
        if self.proprio_projector is not None:
            inputs["proprio"] = self.codec.normalize_state(obs.state.to(self.network.device))
        return inputs

    def _states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        rows, device = len(inputs["prompt_ids"]), self.network.device
        extra = None
        if self.proprio_projector is not None:
            proprio = inputs["proprio"].to(device, self.proprio_projector.fc1.weight.dtype)
            extra = self.proprio_projector(proprio)[:, None]
        tail = torch.zeros(rows, self.num_slots, self.network.width, device=device)
        if self.params.keep_stop_token:
            stop = self.network.embed(torch.full((rows, 1), EOS, device=device))
            tail = torch.cat([tail.to(stop), stop], 1)
        embeddings, mask = self._sequence(inputs, extra=extra, tail=tail)
        hidden = self.network.hidden(embeddings, mask, causal=False)
        # The model was made to predict the next token: what fills a slot is read one position before it.
        first = hidden.shape[1] - tail.shape[1] - 1
        return hidden[:, first : first + self.num_slots].unflatten(1, (-1, self.spec.action_dim))

    def _regressed(self, states: Tensor) -> Tensor:
        """[N,C,A] float32 normalised actions of the L1 head."""
        assert self.action_head is not None
        return self.action_head(states.flatten(1, 2).to(self.action_head.model.fc1.weight.dtype)).float()

    def _parts(self) -> dict[str, nn.Module]:
        found = {"action_head": self.action_head, "proprio_projector": self.proprio_projector}
        return {name: part for name, part in found.items() if part is not None}


def _wanted(setting: bool | None, folder: Path, part: str) -> bool:
    return find_part(folder, part) is not None if setting is None else setting
