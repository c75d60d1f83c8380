"""The reference policy: what the run started from, held fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from embodied_rl.models.base import Evaluation, Policy


class Reference(Protocol):
    """Evaluates recorded decisions under the reference weights, without gradient."""

    policy: Policy
    """What computes them."""

    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        """As ``Policy.evaluate``."""
        ...


class CopiedReference:
    """A copy of the initial policy, sharded like the one that is trained. It is frozen here."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        return self.policy(replay_inputs, temperature=temperature, with_distribution=with_distribution)


class BaseReference:
    """The policy that is trained, without its adapters: no weights of its own.

    It gives what the run started from as long as adapters, and a value head, are all that is trained.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        from embodied_rl.models.weights.lora import adapters_off  # peft takes a second to import

        with adapters_off(self.policy):
            return self.policy(replay_inputs, temperature=temperature, with_distribution=with_distribution)
