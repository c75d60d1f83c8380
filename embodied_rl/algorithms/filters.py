"""Which groups are worth training on."""

from __future__ import annotations

from torch import Tensor

from embodied_rl.algorithms.groups import Groups


def group_filter(
    scores: Tensor, group_ids: Tensor, *, rewards_lower_bound: float, rewards_upper_bound: float
) -> Tensor:
    """Members of groups whose mean score lies in ``[rewards_lower_bound, rewards_upper_bound]``, bounds included.

    Groups that always fail or always succeed carry no gradient; bounds of .1 and .9 on 0/1 scores drop those and the
    nearly hopeless ones (DAPO's dynamic sampling, arXiv:2503.14476 section 3.2).

    Args:
        scores: [N].
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
