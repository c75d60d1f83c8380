"""Statistics over valid units that stay exact when the units are spread over ranks.

``reduce`` is a callback that sums a small float64 tensor over all ranks (``all_reduce``); None means one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


def masked_moments(units: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of the units where ``mask`` (same shape, bool) is true."""
    kept = units.masked_fill(~mask, 0.0).double().flatten()
    return torch.stack((mask.sum().double(), kept.sum(), kept.dot(kept)))


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased (n - 1) variance, float64 scalars; the variance of fewer than two units is 0."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean) / (count - 1.0).clamp(min=1.0)
    return mean, variance.clamp(min=0.0)


def normalize_advantages(
    advantages: Tensor, mask: Tensor, *, reduce: Reduce | None = None, eps: float = 1e-5
) -> Tensor:
    """``(A - mean) / (std + eps)`` over the valid units of all ranks; 0 where ``mask`` is false."""
    moments = masked_moments(advantages, mask)
    mean, variance = mean_and_variance(reduce(moments) if reduce else moments)
    # Python scalars keep the tensor's dtype and read the device once.
    shift, scale = torch.stack((mean, variance.sqrt() + eps)).tolist()
    return ((advantages - shift) / scale).masked_fill(~mask, 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> float:
    """``1 - Var(R - V) / Var(R)`` over the valid units of all ranks; NaN where the returns do not vary."""
    moments = torch.stack((masked_moments(returns - values, mask), masked_moments(returns, mask)))
    error, target = (mean_and_variance(row)[1].item() for row in (reduce(moments) if reduce else moments))
    return 1.0 - error / target if target > 0.0 else float("nan")
