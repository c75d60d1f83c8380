"""Learning from demonstrations."""

from __future__ import annotations

from torch import Tensor

from embodied_rl.algorithms.diagnostics import Diagnostics


def nll_policy_loss(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Diagnostics]:
    """Negative log-likelihood of what was demonstrated. Who demonstrated it, and with which reward, does not count.

    Args:
        logprobs: under the weights being trained, with gradient.
        mask: the units of the demonstration.

    Returns:
        Unit losses and ``policy_loss``.
    """
    del old_logprobs, advantages
    units = -logprobs
    diagnostics = Diagnostics()
    diagnostics.add_mean("policy_loss", units, mask)
    return units, diagnostics
