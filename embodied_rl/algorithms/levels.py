"""Levels, and which of them fit together."""

from __future__ import annotations

from typing import Literal, get_args

RewardLevel = Literal["chunk_level", "action_level"]
"""``algorithm.reward_type``: one reward, value and advantage a chunk, or one a step."""
LogprobLevel = Literal["token_level", "action_level", "chunk_level"]
"""``algorithm.logprob_type`` and ``algorithm.entropy_type``: one unit a token [C,A], a step [C] or a chunk []."""
NormLevel = Literal["none", "group", "batch"]
"""What a mean or a deviation is taken over; see ``normalization.normalize``."""
RatioLevel = Literal["token", "sequence"]
"""``algorithm.importance_sampling_level``: a ratio a unit, or the geometric mean of a sample's."""
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""``algorithm.loss_agg_func``; see ``aggregation.py``."""
KLType = Literal["k1", "abs", "k2", "k3", "full"]
"""``algorithm.kl_penalty_type``; see ``kl.py``."""

LEVEL_PAIRS: frozenset[tuple[str, str]] = frozenset(
    {
        ("chunk_level", "token_level"),
        ("chunk_level", "action_level"),
        ("chunk_level", "chunk_level"),
        ("action_level", "token_level"),
        ("action_level", "action_level"),
    }
)
"""Legal (reward level, log-probability level): an advantage is copied to finer units, never merged."""


def check_levels(reward_type: str, logprob_type: str) -> None:
    """Refuse a reward level that is finer than the log-probability level.

    Raises:
        ValueError: an unknown level, or action-level rewards with chunk-level log-probabilities.
    """
    for key, got, known in (
        ("reward_type", reward_type, get_args(RewardLevel)),
        ("logprob_type", logprob_type, get_args(LogprobLevel)),
    ):
        if got not in known:
            raise ValueError(f"algorithm.{key}: got {got!r}, expected one of {', '.join(known)}")
    if (reward_type, logprob_type) not in LEVEL_PAIRS:
        raise ValueError(
            f"algorithm.reward_type={reward_type} with algorithm.logprob_type={logprob_type}: the C advantages "
            "of a chunk cannot share its one ratio; use logprob_type=action_level or token_level, "
            "or reward_type=chunk_level"
        )
