"""The reference policy: what the run started from, held fixed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied_rl.models.base import Evaluation, Policy


class Reference:
    """Evaluates recorded decisions under the reference weights, without gradient.

    Args:
        policy: a copy of the initial policy, sharded like the one that is trained. It is frozen here.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, replay_inputs: Mapping[str, Tensor], *, temperature: float, with_distribution: bool = False
    ) -> Evaluation:
        """As ``Policy.evaluate``."""
        return self.policy(replay_inputs, temperature=temperature, with_distribution=with_distribution)
