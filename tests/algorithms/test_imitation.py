"""The likelihood of demonstrations, by hand."""

from __future__ import annotations

import torch

from embodied_rl.algorithms.losses import nll_policy_loss


def test_units_are_negative_log_likelihoods_whatever_the_rest() -> None:
    logprobs = torch.tensor([[-0.5, -2.0], [-1.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    for other in (torch.zeros(2, 2), torch.full((2, 2), 7.0)):
        units, diagnostics = nll_policy_loss(logprobs=logprobs, old_logprobs=other, advantages=other, mask=mask)
        assert units.tolist() == [[0.5, 2.0], [1.0, 9.0]]
        assert abs(diagnostics.result()["policy_loss"] - 3.5 / 3) < 1e-7
    units[mask].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, -1.0], [-1.0, 0.0]]
