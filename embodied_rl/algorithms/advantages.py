"""Advantage estimators. ``catalog.ADVANTAGES`` names them; a new one is one more function with this signature, here or
in a file of its own (``catalog.advantage_estimator``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.algorithms.statistics import Groups, rollout_returns
from embodied_rl.schema.types import RewardLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Inputs of an estimator; the fields are those of ``contracts.Trajectory``."""

    reward_level: RewardLevel
    rewards: Tensor
    """[T,N,C]."""
    terminated: Tensor
    """[T,N,C] bool."""
    truncated: Tensor
    """[T,N,C] bool."""
    valid: Tensor
    """[T,N,C] bool."""
    group_ids: Tensor
    """[N] int64; a group's members are all here."""
    scores: Tensor
    """[N]: each env's return, the sum of its valid rewards, normalised where ``reward_norm`` says so."""
    penalties: Tensor | None = None
    """[T,N,C], at least 0 in the mean: to be taken off the rewards (the divergence from the reference policy)."""
    values: Tensor | None = None
    """[T,N,V]."""
    bootstrap_values: Tensor | None = None
    """[T,N]: the value of the state that follows chunk t in the same episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimate:
    """An estimator's answer; U is [T,N] at chunk level and [T,N,C] at action level."""

    advantages: Tensor
    """[U], 0 where not valid."""
    valid: Tensor
    """[U] bool."""
    returns: Tensor | None
    """[T,N,V] targets of the value head, 0 where not valid; None where the estimator has no critic."""


def estimate_advantages(adv_type: str, inputs: AdvantageInputs, options: Mapping[str, Any]) -> AdvantageEstimate:
    """Run the estimator called ``adv_type`` with its hyperparameters (see ``catalog``)."""
    return ADVANTAGES[adv_type].load()(inputs, **options)


@torch.no_grad()
def gae(inputs: AdvantageInputs, *, gamma: float, gae_lambda: float) -> AdvantageEstimate:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    At chunk level a chunk is one step of the decision process: its reward is the sum of its valid steps' rewards, and
    ``gamma`` discounts once a chunk. At action level ``gamma`` discounts once a simulator step.

    Raises:
        ValueError: no values, or not as many as the level needs.
    """
    values, bootstrap = inputs.values, inputs.bootstrap_values
    if values is None or bootstrap is None:
        raise ValueError("adv_type=gae: the rollout has no values; use a policy with a value head, or adv_type=grpo")
    t, n, c = inputs.rewards.shape
    wanted = 1 if inputs.reward_level == "chunk_level" else c
    if tuple(values.shape) != (t, n, wanted):
        raise ValueError(
            f"adv_type=gae, reward_type={inputs.reward_level}: got values {list(values.shape)}, "
            f"expected [{t}, {n}, {wanted}]"
        )
    rewards = inputs.rewards if inputs.penalties is None else inputs.rewards - inputs.penalties
    if inputs.reward_level == "chunk_level":
        valid = inputs.valid.any(-1)
        advantages, returns = gae_recursion(
            rewards=rewards.masked_fill(~inputs.valid, 0.0).sum(-1),
            values=values.squeeze(-1),
            next_values=bootstrap,
            terminated=(inputs.terminated & inputs.valid).any(-1),
            truncated=(inputs.truncated & inputs.valid).any(-1),
            valid=valid,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        return AdvantageEstimate(advantages=advantages, valid=valid, returns=returns.unsqueeze(-1))
    step_values, truncated = _in_time(values), _in_time(inputs.truncated)
    following = torch.empty_like(step_values)
    following[:-1] = step_values[1:]
    by_chunk = following.view(t, c, n)
    by_chunk[:, -1] = bootstrap
    advantages, returns = gae_recursion(
        rewards=_in_time(rewards),
        values=step_values,
        next_values=torch.where(truncated.view(t, c, n), bootstrap.unsqueeze(1), by_chunk).view(t * c, n),
        terminated=_in_time(inputs.terminated),
        truncated=truncated,
        valid=_in_time(inputs.valid),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    return AdvantageEstimate(
        advantages=_in_chunks(advantages, inputs.valid), valid=inputs.valid, returns=_in_chunks(returns, inputs.valid)
    )


def gae_recursion(
    *,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """The recursion of :func:`gae` along the first axis; every tensor is [L,N].

    ``next_values[l]`` is the value of the state that step l led to, in its own episode. A position that is not valid
    hands the advantage of the next one on unchanged and itself gets 0.

    Returns:
        Advantages and returns, [L,N] each.
    """
    invalid = ~valid
    # Every position is A_l = a_l + b_l * A_{l+1}.
    a = (next_values * gamma).masked_fill_(terminated, 0.0).add_(rewards).sub_(values).masked_fill_(invalid, 0.0)
    b = torch.full_like(a, gamma * gae_lambda).masked_fill_(terminated | truncated, 0.0).masked_fill_(invalid, 1.0)
    advantages = _scan(a, b).masked_fill_(invalid, 0.0)
    return advantages, (advantages + values).masked_fill_(invalid, 0.0)


BLOCK = 8
"""Steps that :func:`_scan` combines before it goes through time: fewer, larger operations."""


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """``A_l = a_l + b_l * A_{l+1}`` along the first axis, ``A`` behind the end being 0; overwrites both ([L,N]).

    A long axis is cut into blocks. In all blocks at once every step becomes a function of what follows its block; then
    the blocks' first steps are gone through one by one, and the others filled in.
    """
    length = len(a)
    size = BLOCK if length > BLOCK**2 and length % BLOCK == 0 else 1
    a, b = a.view(length // size, size, -1), b.view(length // size, size, -1)
    for step in range(size - 2, -1, -1):
        a[:, step].addcmul_(b[:, step], a[:, step + 1])
        b[:, step].mul_(b[:, step + 1])
    first, factor = a[:, 0].unbind(), b[:, 0].unbind()
    for block in range(len(a) - 2, -1, -1):
        first[block].addcmul_(factor[block], first[block + 1])
    if size > 1:
        a[:-1, 1:].addcmul_(b[:-1, 1:], a[1:, :1])
    return a.view(length, -1)


@torch.no_grad()
def grpo(inputs: AdvantageInputs, *, norm_std: bool = True, eps: float = 1e-6) -> AdvantageEstimate:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1).

    ``A = (R - mean) / (std + eps)`` over the group, where ``R`` is the sum of an env's valid rewards over the rollout
    and ``std`` the unbiased one. Every valid unit of the env gets the same advantage. ``norm_std=False`` leaves the
    division out (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: a group with one member.
    """
    return same_everywhere(
        inputs, group_relative(penalized_scores(inputs), inputs.group_ids, norm_std=norm_std, eps=eps)
    )


def group_relative(scores: Tensor, group_ids: Tensor, *, norm_std: bool = True, eps: float = 1e-6) -> Tensor:
    """[N] from scores [N] and group ids [N]; the core of :func:`grpo`."""
    groups = Groups.of(group_ids)
    groups.check_sizes()
    centred = groups.centred(scores)
    return (centred / (groups.std(centred) + eps) if norm_std else centred).to(scores.dtype)


@torch.no_grad()
def rloo(inputs: AdvantageInputs) -> AdvantageEstimate:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740, section 2.3): ``R - mean of the others' R``.

    ``R`` is as in :func:`grpo`, and every valid unit of the env gets the same advantage.

    Raises:
        ValueError: a group with one member.
    """
    scores = penalized_scores(inputs)
    groups = Groups.of(inputs.group_ids)
    groups.check_sizes()
    sizes = groups.sizes[groups.member_of].double()
    # R - (sum - R) / (n - 1) = n / (n - 1) * (R - mean)
    advantages = sizes / (sizes - 1.0) * groups.centred(scores)
    return same_everywhere(inputs, advantages.to(scores.dtype))


@torch.no_grad()
def raw(inputs: AdvantageInputs) -> AdvantageEstimate:
    """REINFORCE without a baseline (Williams 1992): the rollout's return ``R`` at every valid unit of the env.

    With ``reward_norm`` any group or batch baseline is this: GRPO's is mean and deviation of the group.
    """
    return same_everywhere(inputs, penalized_scores(inputs))


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> AdvantageEstimate:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the discounted return-to-go of a terminal reward.

    The rollout's return ``R`` is taken as paid at the env's last valid unit, so a unit with k valid units of the env
    after it gets ``gamma^k R``; penalties are paid where they arise. To be whitened over the batch
    (``algorithm.normalize_advantages``).
    """
    return _to_go(inputs, inputs.scores, gamma)


@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, gamma: float) -> AdvantageEstimate:
    """:func:`reinforce_plus_plus` of ``R`` minus its group's mean.

    Raises:
        ValueError: a group with one member.
    """
    return _to_go(inputs, group_relative(inputs.scores, inputs.group_ids, norm_std=False), gamma)


def penalized_scores(inputs: AdvantageInputs) -> Tensor:
    """[N]: scores less each env's penalties."""
    if inputs.penalties is None:
        return inputs.scores
    return inputs.scores - rollout_returns(inputs.penalties, inputs.valid)


def _discounted_sums(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[L,N]: ``S_l = r_l + gamma S_{l+1}`` where valid; elsewhere 0, and handed on undiscounted."""
    nothing = torch.zeros_like(rewards)
    never = torch.zeros_like(mask)
    # That is the recursion of GAE with values of 0 and lambda = 1.
    return gae_recursion(
        rewards=rewards,
        values=nothing,
        next_values=nothing,
        terminated=never,
        truncated=never,
        valid=mask,
        gamma=gamma,
        gae_lambda=1.0,
    )[0]


def _unit_mask(inputs: AdvantageInputs) -> Tensor:
    """[U] bool: the units of the reward level that were taken."""
    return inputs.valid.any(-1) if inputs.reward_level == "chunk_level" else inputs.valid


def same_everywhere(inputs: AdvantageInputs, per_env: Tensor) -> AdvantageEstimate:
    """Give each env's number ([N]) to all its valid units."""
    valid = _unit_mask(inputs)
    spread = per_env if inputs.reward_level == "chunk_level" else per_env.unsqueeze(-1)
    return AdvantageEstimate(advantages=spread.expand_as(valid).masked_fill(~valid, 0.0), valid=valid, returns=None)


def _to_go(inputs: AdvantageInputs, per_env: Tensor, gamma: float) -> AdvantageEstimate:
    """Discount each env's number ([N]) back from its last valid unit, and penalties from where they arose."""
    valid = _unit_mask(inputs)
    mask = _in_time(valid)
    later = mask.flip(0).cumsum(0).flip(0) - mask.long()
    advantages = (per_env * gamma**later).masked_fill(~mask, 0.0)
    if inputs.penalties is not None:
        penalties = inputs.penalties.masked_fill(~inputs.valid, 0.0)
        paid = _in_time(penalties.sum(-1) if valid.ndim == 2 else penalties)
        advantages = advantages - _discounted_sums(paid, mask, gamma)
    return AdvantageEstimate(advantages=_in_chunks(advantages, valid), valid=valid, returns=None)


def _in_time(units: Tensor) -> Tensor:
    """[L,N], in the order of time: from [T,N] at chunk level, or [T,N,C] at action level."""
    return units if units.ndim == 2 else units.transpose(1, 2).flatten(0, 1)


def _in_chunks(units: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_in_time`, to the shape of ``like``."""
    if like.ndim == 2:
        return units
    t, n, c = like.shape
    return units.view(t, c, n).transpose(1, 2).contiguous()
