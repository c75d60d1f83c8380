"""``openvla``: one action of A tokens, one token after another (Kim et al. 2024, arXiv:2406.09246).

::

    BOS | patches of the image | prompt … 29871 | token 1 | token 2 | … | token A-1
                                            └► 1      └► 2      └► 3           └► A

Acting takes one pass over the prompt and one over each token, with the attention's keys and values kept; evaluating
takes a single pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Evaluation, PolicyOutput, PolicySpec
from embodied_rl.models.openvla.policy import OpenVlaBase, OpenVlaParams, entropy_of
from embodied_rl.models.openvla.tiny import write_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaSingleParams(OpenVlaParams):
    """``model.params`` of ``openvla``."""

    camera: str = "agentview"


class OpenVlaPolicy(OpenVlaBase):
    """Categorical over 256 tokens for each of A actions, given those before it; ``replay_inputs`` have ``tokens``
    [N,1,A] int64, ids of the vocabulary."""

    Params = OpenVlaSingleParams
    name: ClassVar[str] = "openvla"

    def __init__(self, spec: PolicySpec, params: OpenVlaSingleParams, folder: Path | None = None) -> None:
        if spec.num_action_chunks != 1:
            raise UserError(
                f"model.num_action_chunks: got {spec.num_action_chunks}, expected 1: openvla decides on one action at "
                "a time; openvla_oft decides on several"
            )
        super().__init__(spec, params, folder, (params.camera,))

    @classmethod
    def write_tiny(cls, directory: Path) -> None:
        """Write a small checkpoint for LIBERO and the dummy env, with random weights, for tests and trials."""
        write_tiny(directory, with_l1_head=False)

    @torch.no_grad()
    def act(self, obs: EnvObs, *, greedy: bool, temperature: float, generator: torch.Generator | None) -> PolicyOutput:
        inputs = self._inputs(obs)
        new, mask = self._sequence(inputs, extra=None, tail=self._embedded(None, len(obs)))
        cache = DynamicCache(config=self.network.language_model.config)
        last = self.network.hidden(new, mask, causal=True, cache=cache)[:, -1]
        values = None if self.value_head is None else self._value_of(last)
        tokens, logprobs = [], []
        while True:
            log_probabilities = self._log_probabilities(last, temperature)
            tokens.append(self._choose(log_probabilities, greedy=greedy, generator=generator))
            logprobs.append(self._pick(log_probabilities, tokens[-1]))
            if len(tokens) == self.spec.action_dim:
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            last = self.network.hidden(self.network.embed(tokens[-1][:, None]), mask, causal=True, cache=cache)[:, -1]
        chosen = torch.stack(tokens, 1)[:, None]
        return PolicyOutput(
            actions=self.codec.to_env(self.codec.normalized(chosen)),
            logprobs=torch.stack(logprobs, 1)[:, None],
            values=values,
            replay_inputs={**inputs, "tokens": chosen},
            tokens=chosen,
        )

    def evaluate(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        tokens = replay_inputs["tokens"].to(self.network.device)
        hidden = self._hidden(replay_inputs, tokens[:, 0])
        log_probabilities = self._log_probabilities(hidden, temperature)[:, None]
        return Evaluation(
            logprobs=self._pick(log_probabilities, tokens),
            entropy=entropy_of(log_probabilities),
            values=None if self.value_head is None else self._value_of(hidden[:, 0]),
            distribution={"logits": log_probabilities.clone()} if with_distribution else None,  # FSDP warns of views
        )

    def demonstration(
        self, obs: EnvObs, actions: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        normalized = self.codec.from_env(actions.to(self.network.device))
        return {**self._inputs(obs), "tokens": self.codec.tokens(normalized)}

    def _first_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        new, mask = self._sequence(inputs, extra=None, tail=self._embedded(None, len(inputs["prompt_ids"])))
        return self.network.hidden(new, mask, causal=True)[:, -1]

    def _hidden(self, inputs: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """[N,A,H]: what each of the tokens [N,A] is decided from."""
        new, mask = self._sequence(inputs, extra=None, tail=self._embedded(tokens[:, :-1], len(tokens)))
        return self.network.hidden(new, mask, causal=True)[:, -self.spec.action_dim :]

    def _embedded(self, tokens: Tensor | None, rows: int) -> Tensor:
        """[N,K,H] of tokens [N,K]; None: of none."""
        if tokens is None:
            tokens = torch.zeros(rows, 0, dtype=torch.int64, device=self.network.device)
        return self.network.embed(tokens)
