"""Filters of the loss: of whole groups, of shared prefixes, of units too far off the policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied_rl.algorithms.losses import log_ratios
from embodied_rl.algorithms.statistics import Groups
from embodied_rl.schema.types import RatioLevel

Gather = Callable[[Tensor], Tensor]
"""Concatenates one-dimensional tensors of all ranks, of different lengths."""


def group_filter(
    scores: Tensor, group_ids: Tensor, *, rewards_lower_bound: float, rewards_upper_bound: float
) -> Tensor:
    """Members of groups whose mean score lies in ``[rewards_lower_bound, rewards_upper_bound]``, bounds included.

    A score is what the task says of a member (``Trajectory.scores``): the success of an episode, so that the mean is
    the group's success rate, or what the reward function gave a completion. DAPO's dynamic sampling (arXiv:2503.14476,
    section 3.2 and eq. 11) asks whether answers are right, not what its penalty for long ones leaves of the reward.
    Groups that always fail or always succeed carry no gradient; bounds of .1 and .9 drop those and the nearly hopeless
    ones.

    Args:
        scores: [N], none of them NaN.
        group_ids: [N] int64.

    Returns:
        [N] bool.

    Raises:
        ValueError: the lower bound is above the upper.
    """
    if rewards_lower_bound > rewards_upper_bound:
        raise ValueError(
            f"rewards_lower_bound={rewards_lower_bound} is above rewards_upper_bound={rewards_upper_bound}: "
            "no group could pass"
        )
    mean = Groups.of(group_ids).mean(scores)
    return (mean >= rewards_lower_bound) & (mean <= rewards_upper_bound)


def prefix_filter(tokens: Tensor, valid: Tensor, returns: Tensor, group_ids: Tensor, *, min_tokens: int) -> Tensor:
    """Tokens outside the prefixes that a group's members share although their returns differ.

    What a good and a bad sequence both begin with is credited and blamed at once. A prefix shorter than ``min_tokens``
    stays, and so does one that is a whole sequence (Cosmos-RL's ``min_filter_prefix_tokens``).

    Args:
        tokens: [N,L] int64, each row one sequence in the order of time.
        valid: [N,L] bool; the valid tokens stand first.
        returns: [N], what advantages are made of.
        group_ids: [N] int64.

    Returns:
        [N,L] bool.
    """
    length = valid.sum(1)
    masked = torch.zeros_like(length)
    for group in torch.unique(group_ids):
        members = (group_ids == group).nonzero().squeeze(-1)
        its, ok = tokens[members], valid[members]
        same = (its[:, None] == its[None]) & ok[:, None] & ok[None]
        shared = same.long().cumprod(-1).sum(-1)  # [n,n]: length of the common prefix
        differs = returns[members][:, None] != returns[members][None]
        masked[members] = torch.where(differs, shared, 0).amax(1)
    masked = torch.where((masked >= min_tokens) & (masked < length), masked, 0)
    return torch.arange(tokens.shape[1], device=tokens.device)[None] >= masked[:, None]


def m2po_filter(
    old_logprobs: Tensor, proximal_logprobs: Tensor, mask: Tensor, *, m2_threshold: float, gather: Gather | None = None
) -> Tensor:
    """Units that stay when those farthest off the policy go until the second moment of the rest is below a threshold.

    The moment is the mean of ``(log π_behaviour - log π_proximal)²`` over the valid units of all ranks (M2PO,
    arXiv:2510.01161, algorithm 1). Units of equal distance stay or go together, so neither order nor ranks matter; the
    nearest always stay.

    Args:
        old_logprobs, proximal_logprobs: any shape.
        mask: bool of that shape.

    Returns:
        bool of that shape, within ``mask``.
    """
    distance = (old_logprobs - proximal_logprobs).double().square()
    own = distance[mask]
    everything = (gather(own) if gather else own).sort().values
    if not len(everything):
        return mask
    mean = everything.cumsum(0) / torch.arange(1, len(everything) + 1, dtype=torch.float64, device=everything.device)
    last_of_equals = torch.cat((everything[1:] > everything[:-1], everything.new_ones(1, dtype=torch.bool)))
    fits = (mean < m2_threshold) & last_of_equals
    limit = everything[fits][-1] if fits.any() else everything[0]
    return mask & (distance <= limit)


def behaviour_filter(
    old_logprobs: Tensor, proximal_logprobs: Tensor, mask: Tensor, *, cap: float, level: RatioLevel = "token"
) -> Tensor:
    """Units whose weight ``π_proximal / π_behaviour`` is at most ``cap``, within ``mask`` (AReaL, arXiv:2505.24298).

    At the ``sequence`` level, the weight is that of ``losses.log_ratios``, and a sample stays or goes as a whole.
    """
    return mask & (log_ratios(proximal_logprobs, old_logprobs, mask, level).exp() <= cap)
