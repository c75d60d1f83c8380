"""Statistics over masked units that stay exact over micro-batches, groups and ranks, and normalisation by them.

``reduce`` is a callback that sums a small float64 tensor over all ranks (``all_reduce``); None means one rank. A mean
is kept as (sum, count) and a maximum as itself, so adding up parts gives what the whole would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.schema.types import NormLevel

Reduce = Callable[[Tensor], Tensor]
ROUNDING = 1e-6
"""Scores that differ by no more than this share of the larger are equal: sums of many float32 rewards are no closer."""
_PARTS = 64
"""Parts of a mean that are kept apart, at most."""


def rollout_returns(rewards: Tensor, valid: Tensor) -> Tensor:
    """[N]: the sum of each env's valid rewards over the whole rollout, from [T,N,C].

    With auto-reset a rollout holds several episodes of an env; they count as one sample, whose return is their sum.
    """
    # Time first: over the short last axis, and over both at once, a sum is eight times slower.
    return rewards.masked_fill(~valid, 0.0).sum(0).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The members of each group."""

    ids: Tensor
    """[G] int64, the distinct group ids in ascending order."""
    member_of: Tensor
    """[N] int64, each member's index in ``ids``."""
    sizes: Tensor
    """[G] int64."""

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """From [N] int64 group ids in any order."""
        ids, member_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(ids=ids, member_of=member_of, sizes=sizes)

    def sum(self, values: Tensor) -> Tensor:
        """[G]: the sum of ``values`` [N] over each group, in their type."""
        return values.new_zeros(len(self.ids)).index_add_(0, self.member_of, values)

    def mean(self, scores: Tensor) -> Tensor:
        """[N] float64: the mean of each member's group.

        Float64, so that the mean of equal float32 scores *is* that score and their difference exactly 0.
        """
        return (self.sum(scores.double()) / self.sizes)[self.member_of]

    def equal(self, scores: Tensor) -> Tensor:
        """[G] bool: whether the members of each group have the same score ([N]), rounding aside."""
        nothing = scores.new_zeros(len(self.ids))
        highest, lowest = (
            nothing.scatter_reduce(0, self.member_of, scores, reduce, include_self=False) for reduce in ("amax", "amin")
        )
        spread = highest - lowest  # infinite scores are an error, which is to come to light
        return (spread <= ROUNDING * torch.maximum(highest.abs(), lowest.abs())) & spread.isfinite()

    def centred(self, scores: Tensor) -> Tensor:
        """[N] float64: scores ([N]) less their group's mean; exactly 0 where its members' are equal, since divided by
        the deviation of what rounding left they would be as large as any."""
        return (scores.double() - self.mean(scores)).masked_fill_(self.equal(scores)[self.member_of], 0.0)

    def std(self, centred: Tensor) -> Tensor:
        """[N] float64: the unbiased (n - 1) standard deviation of each member's group. Needs two members or more.

        Args:
            centred: [N] float64, scores less their group's mean.
        """
        return (self.sum(centred.square()) / (self.sizes - 1)).sqrt()[self.member_of]

    def check_sizes(self) -> None:
        """Raise ValueError if a group has a single member."""
        lonely = self.ids[self.sizes < 2].tolist()
        if lonely:
            raise ValueError(
                f"groups {lonely[:8]} have one member each, expected two or more: a group advantage compares envs that "
                "started from the same state; set algorithm.group_size >= 2 and keep groups whole"
            )


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
    tasks: Groups | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """``(x - mean) / (std + eps)`` over the valid units, mean and std each of the batch, task or group, or left out.

    GRPO's, RLOO's and LitePPO's normalisations are choices of these (Tricks or Traps, arXiv:2508.08221, section 4.1).
    The deviation is always about the plain mean.

    Args:
        units: [B,*].
        mask: bool, of the same shape.
        mean_level, std_level: ``batch`` and ``task`` are all ranks' units.
        leave_one_out: subtract the mean of the *other* units.
        unbiased_std: divide by n - 1; else by n.
        group_ids: [B] int64, needed for the group level; a group's members are all here.
        tasks: needed for the task level: those of all ranks, and which of them each of the B is of.

    Returns:
        As ``units``; 0 where ``mask`` is false, and with a mean taken off where units are equal but for rounding. A
        unit that is alone in its group, task or batch has no deviation and no others: it is not scaled, and with a mean
        taken off it is 0.
    """
    if mask.dtype != torch.bool or mask.shape != units.shape:
        raise ValueError(f"mask: got {list(mask.shape)} {mask.dtype}, expected bool {list(units.shape)}")
    kept = units.masked_fill(~mask, 0.0).double()
    counts: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for level in sorted({mean_level, std_level} - {"none"}):  # each rank has an order of its own of a set
        counts[level], means[level], squares[level] = _moments(kept, mask, level, group_ids, tasks, reduce)
    result = kept
    if mean_level != "none":
        count, mean = counts[mean_level], means[mean_level]
        # Divided by the deviation of what rounding left, equal units would be as large as any.
        rounding = min(ROUNDING, 8 * torch.finfo(units.dtype).eps)
        deviation = (squares[mean_level] / count.clamp(min=1.0)).sqrt()
        result = (kept - mean).masked_fill(deviation <= rounding * mean.abs(), 0.0)
        if leave_one_out:
            # x - (sum - x) / (n - 1) = n / (n - 1) * (x - mean)
            result = result * count / (count - 1.0).clamp(min=1.0)
    if std_level != "none":
        count, deviations = counts[std_level], squares[std_level]
        variance = deviations / (count - float(unbiased_std)).clamp(min=1.0)
        result = torch.where(count > 1.0, result / (variance.sqrt() + eps), result)
    return result.to(units.dtype).masked_fill_(~mask, 0.0)


def _moments(
    kept: Tensor,
    mask: Tensor,
    level: str,
    group_ids: Tensor | None,
    tasks: Groups | None,
    reduce: Reduce | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations, each a scalar or [B,1...] and float64."""
    if level == "batch":
        totals = torch.stack((mask.sum().double(), kept.sum()))
        count, total = (reduce(totals) if reduce else totals).unbind()
        mean = total / count.clamp(min=1.0)
        # In a second pass: the difference of two large sums would lose what small deviations are.
        deviations = (kept - mean).masked_fill_(~mask, 0.0).square_().sum().reshape(1)
        return count, mean, (reduce(deviations) if reduce else deviations)[0]
    if level == "group":
        if group_ids is None:
            raise ValueError("normalisation by group needs the units' group ids")
        groups, reduce = Groups.of(group_ids), None
    elif tasks is None:
        raise ValueError("normalisation by task needs the units' tasks")
    else:
        groups = tasks

    def sums(x: Tensor) -> Tensor:
        per_group = groups.sum(x.double().reshape(len(x), -1).sum(1))
        per_group = reduce(per_group) if reduce else per_group
        return per_group[groups.member_of].reshape(-1, *[1] * (kept.ndim - 1))

    count = sums(mask)
    mean = sums(kept) / count.clamp(min=1.0)
    return count, mean, sums((kept - mean).masked_fill_(~mask, 0.0).square_())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> float:
    """``1 - Var(R - V) / Var(R)`` over the valid units of all ranks; NaN where the returns do not vary."""
    moments = torch.stack((masked_moments(returns - values, mask), masked_moments(returns, mask)))
    error, target = (mean_and_variance(row)[1].item() for row in (reduce(moments) if reduce else moments))
    return 1.0 - error / target if target > 0.0 else float("nan")


class Diagnostics:
    """Named means and maxima."""

    def __init__(self) -> None:
        self._means: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Name -> the sum and count of each part, scalars that :meth:`pair` adds up: few operations a part."""
        self._maxima: dict[str, Tensor] = {}
        """Name -> [] float64."""
        self._counted: tuple[Tensor, Tensor] | None = None
        """The last mask and the number of its units: names that come together share it."""

    @torch.no_grad()
    def add_mean(self, name: str, units: Tensor, mask: Tensor, *, zeroed: bool = False) -> None:
        """Add the units where ``mask`` (same shape, bool) is true to the mean called ``name``.

        Args:
            zeroed: the units are 0 already where ``mask`` is false, which saves most of the cost.
        """
        if units.dtype == torch.bool:
            total = (units & mask).count_nonzero()
        else:
            total = (units if zeroed else torch.where(mask, units, 0.0)).sum(dtype=torch.float64)
        if self._counted is None or self._counted[0] is not mask:
            self._counted = mask, mask.count_nonzero()
        self._add(name, [(total, self._counted[1])])

    @torch.no_grad()
    def add_max(self, name: str, units: Tensor, mask: Tensor) -> None:
        """Let the units where ``mask`` is true compete for the maximum called ``name``."""
        # An empty micro-batch has no maximum; torch would raise.
        if units.numel():
            self._compete(name, torch.where(mask, units, -torch.inf).max().double())
        else:
            self._compete(name, units.new_full((), -torch.inf, dtype=torch.float64))

    def pair(self, name: str) -> Tensor:
        """[2] float64: sum and count of the mean called ``name``; zeros before anything was added."""
        parts = self._means.get(name)
        if not parts:
            return torch.zeros(2, dtype=torch.float64)
        device = parts[0][0].device
        columns = [torch.stack([number.to(device) for number in column]) for column in zip(*parts, strict=True)]
        return torch.stack([column.double().sum() for column in columns])

    def merge(self, other: Diagnostics) -> None:
        """Add another part's numbers, for instance the next micro-batch's."""
        for name, parts in other._means.items():
            self._add(name, parts)
        for name, value in other._maxima.items():
            self._compete(name, value)

    def reduce(self, reduce_sum: Reduce, reduce_max: Reduce) -> None:
        """Combine over ranks with two collectives; every rank must hold the same names.

        Args:
            reduce_sum: sums a float64 tensor over ranks.
            reduce_max: takes the elementwise maximum over ranks.
        """
        means = _combined({name: self.pair(name) for name in self._means}, reduce_sum)
        self._means = {name: [(pair[0], pair[1])] for name, pair in means.items()}
        self._maxima = _combined(self._maxima, reduce_max)

    def result(self) -> dict[str, float]:
        """Name -> number. A name without a single unit is left out: it has no value."""
        numbers: dict[str, float] = {}
        for name in self._means:
            total, count = self.pair(name).tolist()
            if count:
                numbers[name] = total / count
        for name, value in self._maxima.items():
            if (largest := value.item()) != -torch.inf:
                numbers[name] = largest
        return numbers

    def _add(self, name: str, parts: list[tuple[Tensor, Tensor]]) -> None:
        known = self._means.setdefault(name, [])
        known += parts
        if len(known) >= _PARTS:
            pair = self.pair(name)
            known[:] = [(pair[0], pair[1])]

    def _compete(self, name: str, value: Tensor) -> None:
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value.to(known.device))


def _combined(table: Mapping[str, Tensor], combine: Reduce) -> dict[str, Tensor]:
    """One tensor of all, through ``combine``, and apart again."""
    if not table:
        return {}
    names = sorted(table)
    # The accelerator's, if any are there: one read of it then gives all.
    device = max((table[name].device for name in names), key=lambda device: device.type != "cpu")
    return dict(zip(names, combine(torch.stack([table[name].to(device) for name in names])), strict=True))
