"""Advantage estimators. ``catalog.ADVANTAGES`` names them; a new one is one more function with this signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_rl.algorithms.catalog import ADVANTAGES, lookup
from embodied_rl.algorithms.groups import Groups, rollout_scores
from embodied_rl.algorithms.levels import RewardLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at; the fields are those of ``contracts.Trajectory``."""

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


def estimate_advantages(
    adv_type: str, inputs: AdvantageInputs, options: Mapping[str, float | bool]
) -> AdvantageEstimate:
    """Run the estimator called ``adv_type`` with its ``options`` (see ``catalog``)."""
    return lookup(ADVANTAGES, "adv_type", adv_type).load()(inputs, **options)


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
    rewards = inputs.rewards.masked_fill(~inputs.valid, 0.0)
    terminated, truncated = inputs.terminated & inputs.valid, inputs.truncated & inputs.valid
    if inputs.reward_level == "chunk_level":
        valid = inputs.valid.any(-1)
        advantages, returns = gae_recursion(
            rewards=rewards.sum(-1),
            values=values.squeeze(-1),
            next_values=bootstrap,
            terminated=terminated.any(-1),
            truncated=truncated.any(-1),
            valid=valid,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        return AdvantageEstimate(advantages=advantages, valid=valid, returns=returns.unsqueeze(-1))
    following = torch.cat((values[..., 1:], bootstrap.unsqueeze(-1)), -1)
    next_values = torch.where(truncated, bootstrap.unsqueeze(-1), following)

    def in_time(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(t * c, n)

    def in_chunks(x: Tensor) -> Tensor:
        return x.view(t, c, n).transpose(1, 2).contiguous()

    advantages, returns = gae_recursion(
        rewards=in_time(rewards),
        values=in_time(values),
        next_values=in_time(next_values),
        terminated=in_time(terminated),
        truncated=in_time(truncated),
        valid=in_time(inputs.valid),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    return AdvantageEstimate(advantages=in_chunks(advantages), valid=inputs.valid, returns=in_chunks(returns))


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
    one_step = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    # Every position is A_l = a_l + b_l * A_{l+1}: then the sequential part is one fused operation a step.
    a = one_step.masked_fill(~valid, 0.0)
    b = torch.full_like(a, gamma * gae_lambda).masked_fill_(terminated | truncated, 0.0).masked_fill_(~valid, 1.0)
    carried = torch.empty_like(a)
    a_steps, b_steps, carried_steps = a.unbind(), b.unbind(), carried.unbind()
    following = torch.zeros_like(a_steps[0])
    for step in range(len(a_steps) - 1, -1, -1):
        following = torch.addcmul(a_steps[step], b_steps[step], following, out=carried_steps[step])
    advantages = carried.masked_fill(~valid, 0.0)
    return advantages, (advantages + values).masked_fill_(~valid, 0.0)


@torch.no_grad()
def grpo(inputs: AdvantageInputs, *, norm_std: bool = True, eps: float = 1e-6) -> AdvantageEstimate:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1).

    ``A = (R - mean) / (std + eps)`` over the group, where ``R`` is the sum of an env's valid rewards over the rollout
    and ``std`` the unbiased one. Every valid unit of the env gets the same advantage. ``norm_std=False`` leaves the
    division out (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: a group with one member.
    """
    scores = rollout_scores(inputs.rewards, inputs.valid)
    return _same_everywhere(inputs, group_relative(scores, inputs.group_ids, norm_std=norm_std, eps=eps))


def group_relative(scores: Tensor, group_ids: Tensor, *, norm_std: bool = True, eps: float = 1e-6) -> Tensor:
    """[N] from scores [N] and group ids [N]; the core of :func:`grpo`."""
    groups = Groups.of(group_ids)
    groups.check_sizes()
    centred = scores.double() - groups.mean(scores)
    return (centred / (groups.std(scores) + eps) if norm_std else centred).to(scores.dtype)


@torch.no_grad()
def rloo(inputs: AdvantageInputs) -> AdvantageEstimate:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740, section 2.3): ``R - mean of the others' R``.

    ``R`` is as in :func:`grpo`, and every valid unit of the env gets the same advantage.

    Raises:
        ValueError: a group with one member.
    """
    scores = rollout_scores(inputs.rewards, inputs.valid)
    groups = Groups.of(inputs.group_ids)
    groups.check_sizes()
    sizes = groups.sizes[groups.member_of].double()
    # R - (sum - R) / (n - 1) = n / (n - 1) * (R - mean)
    advantages = sizes / (sizes - 1.0) * (scores.double() - groups.mean(scores))
    return _same_everywhere(inputs, advantages.to(scores.dtype))


@torch.no_grad()
def raw(inputs: AdvantageInputs) -> AdvantageEstimate:
    """REINFORCE without a baseline (Williams 1992): the rollout's return ``R`` at every valid unit of the env."""
    return _same_everywhere(inputs, rollout_scores(inputs.rewards, inputs.valid))


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> AdvantageEstimate:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the discounted return-to-go of a terminal reward.

    The rollout's return ``R`` is taken as paid at the env's last valid unit, so a unit with k valid units of the env
    after it gets ``gamma^k R``. To be whitened over the batch (``algorithm.normalize_advantages``).
    """
    return _to_go(inputs, rollout_scores(inputs.rewards, inputs.valid), gamma)


@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, gamma: float) -> AdvantageEstimate:
    """:func:`reinforce_plus_plus` of ``R`` minus its group's mean.

    Raises:
        ValueError: a group with one member.
    """
    scores = rollout_scores(inputs.rewards, inputs.valid)
    return _to_go(inputs, group_relative(scores, inputs.group_ids, norm_std=False), gamma)


def _unit_mask(inputs: AdvantageInputs) -> Tensor:
    """[U] bool: the units of the reward level that were taken."""
    return inputs.valid.any(-1) if inputs.reward_level == "chunk_level" else inputs.valid


def _same_everywhere(inputs: AdvantageInputs, per_env: Tensor) -> AdvantageEstimate:
    """Give each env's number ([N]) to all its valid units."""
    valid = _unit_mask(inputs)
    spread = per_env if inputs.reward_level == "chunk_level" else per_env.unsqueeze(-1)
    return AdvantageEstimate(advantages=spread.expand_as(valid).masked_fill(~valid, 0.0), valid=valid, returns=None)


def _to_go(inputs: AdvantageInputs, per_env: Tensor, gamma: float) -> AdvantageEstimate:
    """Discount each env's number ([N]) back from its last valid unit."""
    valid = _unit_mask(inputs)
    # Units in the order of time: [T,N] at chunk level, [T,C,N] flattened at action level.
    in_time = valid if valid.ndim == 2 else valid.transpose(1, 2).flatten(0, 1)
    later = in_time.flip(0).cumsum(0).flip(0) - in_time.long()
    advantages = (per_env * gamma**later).masked_fill(~in_time, 0.0)
    if valid.ndim == 3:
        t, n, c = valid.shape
        advantages = advantages.view(t, c, n).transpose(1, 2).contiguous()
    return AdvantageEstimate(advantages=advantages, valid=valid, returns=None)
