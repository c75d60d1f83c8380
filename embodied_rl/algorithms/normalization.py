"""Statistics over valid units that stay exact when the units are spread over ranks, and normalisation by them.

``reduce`` is a callback that sums a small float64 tensor over all ranks (``all_reduce``); None means one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied_rl.algorithms.levels import NormLevel

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


def normalize(
    units: Tensor,
    mask: Tensor,
    *,
    mean_level: NormLevel,
    std_level: NormLevel,
    leave_one_out: bool = False,
    unbiased_std: bool = True,
    eps: float = 1e-5,
    group_ids: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """``(x - mean) / (std + eps)`` over the valid units, mean and std each of the batch, of the group, or left out.

    GRPO's, RLOO's and LitePPO's normalisations are choices of these (Tricks or Traps, arXiv:2508.08221, section 4.1).
    The deviation is always about the plain mean.

    Args:
        units: [B,*].
        mask: bool, of the same shape.
        mean_level, std_level: ``batch`` is all ranks' units.
        leave_one_out: subtract the mean of the *other* units.
        unbiased_std: divide by n - 1; else by n.
        group_ids: [B] int64, needed for the group level; a group's members are all here.

    Returns:
        As ``units``; 0 where ``mask`` is false. A unit that is alone in its group or batch has no deviation and no
        others: it is not scaled, and with a mean taken off it is 0.
    """
    if mask.dtype != torch.bool or mask.shape != units.shape:
        raise ValueError(f"mask: got {list(mask.shape)} {mask.dtype}, expected bool {list(units.shape)}")
    kept = units.masked_fill(~mask, 0.0).double()
    counts: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for level in {mean_level, std_level} - {"none"}:
        counts[level], means[level], squares[level] = _moments(kept, mask, level, group_ids, reduce)
    result = kept
    if mean_level != "none":
        count, mean = counts[mean_level], means[mean_level]
        result = kept - mean
        if leave_one_out:
            # x - (sum - x) / (n - 1) = n / (n - 1) * (x - mean)
            result = result * count / (count - 1.0).clamp(min=1.0)
    if std_level != "none":
        count, deviations = counts[std_level], squares[std_level]
        variance = deviations / (count - float(unbiased_std)).clamp(min=1.0)
        result = torch.where(count > 1.0, result / (variance.sqrt() + eps), result)
    return result.to(units.dtype).masked_fill_(~mask, 0.0)


def _moments(
    kept: Tensor, mask: Tensor, level: str, group_ids: Tensor | None, reduce: Reduce | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations, each a scalar or [B,1...] and float64."""
    if level == "batch":
        totals = torch.stack((mask.sum().double(), kept.sum()))
        count, total = (reduce(totals) if reduce else totals).unbind()
        mean = total / count.clamp(min=1.0)
        # In a second pass: the difference of two large sums would lose what small deviations are.
        deviations = (kept - mean).masked_fill_(~mask, 0.0).square_().sum().reshape(1)
        return count, mean, (reduce(deviations) if reduce else deviations)[0]
    if group_ids is None:
        raise ValueError("normalisation by group needs the units' group ids")
    groups, member_of = torch.unique(group_ids, return_inverse=True)

    def sums(x: Tensor) -> Tensor:
        per_sample = x.double().reshape(len(x), -1).sum(1)
        per_group = per_sample.new_zeros(len(groups)).index_add_(0, member_of, per_sample)
        return per_group[member_of].reshape(-1, *[1] * (kept.ndim - 1))

    count = sums(mask)
    mean = sums(kept) / count.clamp(min=1.0)
    return count, mean, sums((kept - mean).masked_fill_(~mask, 0.0).square_())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> float:
    """``1 - Var(R - V) / Var(R)`` over the valid units of all ranks; NaN where the returns do not vary."""
    moments = torch.stack((masked_moments(returns - values, mask), masked_moments(returns, mask)))
    error, target = (mean_and_variance(row)[1].item() for row in (reduce(moments) if reduce else moments))
    return 1.0 - error / target if target > 0.0 else float("nan")
