"""Statistics of groups: envs that started from the same state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rollout_returns(rewards: Tensor, valid: Tensor) -> Tensor:
    """[N]: the sum of each env's valid rewards over the whole rollout, from [T,N,C].

    With auto-reset a rollout holds several episodes of an env; they count as one sample, whose return is their sum.
    """
    # Time first: over the short last axis, and over both at once, a sum is eight times slower.
    return rewards.masked_fill(~valid, 0.0).sum(0).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which members form a group."""

    ids: Tensor
    """[G] int64, the distinct group ids in ascending order."""
    member_of: Tensor
    """[N] int64, each member's place in ``ids``."""
    sizes: Tensor
    """[G] int64."""

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """From [N] int64 group ids in any order."""
        ids, member_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(ids=ids, member_of=member_of, sizes=sizes)

    def mean(self, scores: Tensor) -> Tensor:
        """[N] float64: the mean of each member's group.

        Float64, so that the mean of equal float32 scores *is* that score and their difference exactly 0.
        """
        return (self._sum(scores.double()) / self.sizes)[self.member_of]

    def std(self, centred: Tensor) -> Tensor:
        """[N] float64: the unbiased (n - 1) standard deviation of each member's group. Needs two members or more.

        Args:
            centred: [N] float64, scores less their group's mean.
        """
        return (self._sum(centred.square()) / (self.sizes - 1)).sqrt()[self.member_of]

    def check_sizes(self) -> None:
        """Raise ValueError if a group has a single member."""
        lonely = self.ids[self.sizes < 2].tolist()
        if lonely:
            raise ValueError(
                f"groups {lonely[:8]} have one member each, expected two or more: a group advantage compares envs that "
                "started from the same state; set algorithm.group_size >= 2 and keep groups whole"
            )

    def _sum(self, scores: Tensor) -> Tensor:
        return scores.new_zeros(len(self.ids)).index_add_(0, self.member_of, scores)
