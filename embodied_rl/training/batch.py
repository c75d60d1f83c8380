"""From trajectories to training samples: advantages, masks and the order in which the optimiser sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import AdvantageInputs, estimate_advantages
from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.algorithms.filters import group_filter, prefix_filter
from embodied_rl.algorithms.statistics import Groups, Reduce, normalize, rollout_returns
from embodied_rl.algorithms.units import any_at_level, broadcast_to_level, mask_at_level, reduce_to_level
from embodied_rl.contracts import SAMPLE_ID_ROOM, TrainBatch, Trajectory
from embodied_rl.errors import UserError
from embodied_rl.schema import AlgorithmConfig
from embodied_rl.seeding import generator


def build_train_batch(
    trajectories: Sequence[Trajectory],
    config: AlgorithmConfig,
    *,
    kl_beta: float = 0.0,
    last_group: int | None = None,
    tasks: Tensor | None = None,
    reduce: Reduce | None = None,
) -> tuple[TrainBatch, dict[str, Tensor]]:
    """One rank's samples of a training step: every chunk with a valid step in a kept group, and what to report of them.

    Each trajectory holds whole groups, so estimators that compare group members see them all.

    Args:
        kl_beta: weight of ``reference_kl`` in the reward, where trajectories have it.
        last_group: groups of higher ids are left out: the batch is full without them.
        tasks: [K] int64, the different ids of all ranks' tasks, in ascending order; None: all are here.
        reduce: sums a float64 tensor over all ranks; None for one rank.

    Returns:
        The batch and, for the metrics, float64 pairs [2] of (sum, count): ``groups_filtered``, ``groups_equal``,
        ``groups_unscored``, ``score``, and with a prefix filter ``prefix_masked``.

    Raises:
        ValueError: no trajectory at all.
        UserError: a prefix filter for a model without tokens.
    """
    if not trajectories:
        raise ValueError("no trajectory to train on: there are fewer groups than actor ranks")
    entry = ADVANTAGES[config.adv_type]
    unscored = torch.stack([_unscored_groups(t, config) for t in trajectories]).sum(0)
    trajectories, kept = map(list, zip(*[_known_part(t, config, last_group) for t in trajectories], strict=True))
    returns = [rollout_returns(t.rewards, t.valid) for t in trajectories]
    norm = config.reward_norm
    if entry.reward_normalized and (norm.mean_level, norm.std_level) != ("none", "none"):
        normalized = normalize(
            torch.cat(returns),
            torch.cat(kept),
            group_ids=torch.cat([t.group_ids for t in trajectories]),
            tasks=_task_groups([None if t.task_ids is None else t.task_ids[0] for t in trajectories], tasks),
            reduce=reduce,
            **asdict(norm),
        ).split([len(part) for part in returns])
    else:
        normalized = returns
    parts = [
        _samples(t, config, returns=raw, normalized=scores, kept=keep, kl_beta=kl_beta)
        for t, raw, scores, keep in zip(trajectories, returns, normalized, kept, strict=True)
    ]
    fields = {key: _cat([part[key] for part in parts]) for key in parts[0] if key != "counts"}
    advantages, unit_mask, group_ids = (fields.pop(key) for key in ("unit_advantages", "unit_mask", "group_ids"))
    members = _task_groups([fields.pop("task_ids")], tasks)
    if config.normalize_advantages and entry.batch_normalized:
        norm = config.adv_norm
        advantages = normalize(advantages, unit_mask, group_ids=group_ids, tasks=members, reduce=reduce, **asdict(norm))
    fields["advantages"] = broadcast_to_level(
        advantages,
        config.reward_type,
        config.logprob_type,
        num_action_chunks=trajectories[0].logprobs.shape[-2],
        action_dim=trajectories[0].logprobs.shape[-1],
    ).contiguous()
    counts = {name: torch.stack([part["counts"][name] for part in parts]).sum(0) for name in parts[0]["counts"]}
    counts["groups_unscored"] = unscored
    batch = TrainBatch(**fields)
    # A filtered group's chunks carry no gradient. One sample always stays, masked: without any to compute on, a rank
    # could not take part in the collectives of the others.
    trainable = batch.trainable()
    if len(trainable) == len(batch):
        return batch, counts
    return batch.select(trainable if len(trainable) else torch.zeros(1, dtype=torch.int64)), counts


def passing_members(trajectory: Trajectory, config: AlgorithmConfig, *, last_group: int | None = None) -> Tensor:
    """[N] bool: the members that training uses, known ones of the groups that pass the filter and are needed.

    What is trained on, and whether groups are missing that have to be drawn again, both follow from this.

    Args:
        last_group: groups of higher ids are not needed.
    """
    passing = _known_members(trajectory, config)
    if config.filter_rewards:
        passing[passing.clone()] = group_filter(
            trajectory.scores[passing],
            trajectory.group_ids[passing],
            rewards_lower_bound=config.rewards_lower_bound,
            rewards_upper_bound=config.rewards_upper_bound,
        )
    return passing if last_group is None else passing & (trajectory.group_ids <= last_group)


def _known_members(trajectory: Trajectory, config: AlgorithmConfig) -> Tensor:
    """[N] bool: not those without a valid step, whose score nobody knows; nor those of groups that have fewer than two
    others left, where members are compared."""
    known = trajectory.valid.any(0).any(-1)
    if ADVANTAGES[config.adv_type].needs_groups:
        groups = Groups.of(trajectory.group_ids)
        known = known & (groups.sum(known.long())[groups.member_of] >= 2)
    return known


def _known_part(trajectory: Trajectory, config: AlgorithmConfig, last_group: int | None) -> tuple[Trajectory, Tensor]:
    """The known members, and which of them ([n] bool) pass; where there is none, all of them without a valid step."""
    known, passing = _known_members(trajectory, config), passing_members(trajectory, config, last_group=last_group)
    part = trajectory.select(known)
    if part is None:
        return replace(trajectory, valid=torch.zeros_like(trajectory.valid)), passing
    return part, passing[known]


def taken_chunks(trajectory: Trajectory) -> Tensor:
    """[T,N] bool: the chunks in which anything happened, or one where nothing did: a batch needs a sample."""
    taken = trajectory.valid.any(-1)
    if not taken.any():
        taken[0, 0] = True
    return taken


def replay_inputs_of(trajectory: Trajectory, chunks: Tensor) -> dict[str, Tensor]:
    """The policy's inputs of ``chunks`` [T,N] bool, each [number of them,...]."""
    rows = chunks.flatten().nonzero().squeeze(-1)
    # Indexing by a mask would copy pictures byte by byte.
    return {key: tensor.flatten(0, 1).index_select(0, rows) for key, tensor in trajectory.replay_inputs.items()}


def _samples(
    t: Trajectory, config: AlgorithmConfig, *, returns: Tensor, normalized: Tensor, kept: Tensor, kl_beta: float
) -> dict[str, Any]:
    """A trajectory's valid chunks, flat, with advantages still at the reward level."""
    options = ADVANTAGES[config.adv_type].hyperparameters(config)
    penalties = None
    if t.reference_kl is not None:
        penalties = kl_beta * t.reference_kl.sum(-1).masked_fill(~t.valid, 0.0)
    estimate = estimate_advantages(
        config.adv_type,
        AdvantageInputs(
            reward_level=config.reward_type,
            rewards=t.rewards,
            terminated=t.terminated,
            truncated=t.truncated,
            valid=t.valid,
            group_ids=t.group_ids,
            scores=normalized,
            penalties=penalties,
            values=t.values,
            bootstrap_values=t.bootstrap_values,
        ),
        options,
    )
    valid = t.valid & kept[None, :, None]
    flat = taken_chunks(t)
    chunk_numbers = torch.arange(len(t.rewards))[:, None].expand_as(flat)
    ids = (t.rollout_epoch * SAMPLE_ID_ROOM + t.env_ids)[None, :].expand_as(flat) * SAMPLE_ID_ROOM + chunk_numbers
    unit_mask = valid.any(-1) if config.reward_type == "chunk_level" else valid
    loss_mask = mask_at_level(valid[flat], config.logprob_type, t.logprobs.shape[-1]).contiguous()
    counts = _counts(t, returns, kept)
    if config.min_filter_prefix_tokens is not None:
        unshared = _outside_shared_prefixes(t, returns, config.min_filter_prefix_tokens)[flat]
        before = int(loss_mask.sum())
        loss_mask = loss_mask & any_at_level(unshared, config.logprob_type)
        counts["prefix_masked"] = _pair(before - loss_mask.sum(), before)

    def at_level(tokens: Tensor | None) -> Tensor | None:
        return None if tokens is None else reduce_to_level(tokens[flat], valid[flat], config.logprob_type)

    return {
        "sample_ids": ids[flat],
        "replay_inputs": replay_inputs_of(t, flat),
        "logprobs": at_level(t.logprobs),
        "loss_mask": loss_mask,
        "valid": valid[flat],
        "values": None if t.values is None else t.values[flat],
        "returns": None if estimate.returns is None else estimate.returns[flat],
        "value_mask": None if estimate.returns is None else unit_mask[flat].reshape(int(flat.sum()), -1),
        "policy_version": t.policy_versions[flat],
        "scores": t.scores[None].expand_as(flat)[flat],
        "proximal_logprobs": at_level(t.proximal_logprobs),
        "reference_logprobs": None if t.reference_logprobs is None else t.reference_logprobs[flat],
        "unit_advantages": estimate.advantages[flat],
        "unit_mask": unit_mask[flat],
        "group_ids": t.group_ids[None].expand_as(flat)[flat],
        "task_ids": None if t.task_ids is None else t.task_ids[flat],
        "counts": counts,
    }


def _outside_shared_prefixes(t: Trajectory, returns: Tensor, min_tokens: int) -> Tensor:
    """[T,N,C,A] bool; an env's tokens over its whole rollout are one sequence."""
    if t.tokens is None:
        raise UserError(
            f"algorithm.min_filter_prefix_tokens={min_tokens} compares tokens, and this model's actions are not "
            "discrete; set it to null, or use a model with discrete actions"
        )
    steps, members, chunk, dims = t.tokens.shape
    tokens = t.tokens.transpose(0, 1).reshape(members, -1)
    valid = t.valid.transpose(0, 1).reshape(members, -1).repeat_interleave(dims, 1)
    keep = prefix_filter(tokens, valid, returns, t.group_ids, min_tokens=min_tokens)
    return keep.view(members, steps, chunk, dims).transpose(0, 1)


def _counts(t: Trajectory, returns: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Metrics of a trajectory in which all members are known, or none."""
    if not t.valid.any():
        return dict.fromkeys(("groups_equal", "groups_filtered", "score"), _pair(0.0, 0.0))
    groups = Groups.of(t.group_ids)
    return {
        "groups_equal": _pair(groups.equal(returns).sum(), len(groups.ids)),
        "groups_filtered": _pair((groups.sum(kept.long()) == 0).sum(), len(groups.ids)),
        "score": _pair(t.scores.sum(), len(t.scores)),
    }


def _unscored_groups(t: Trajectory, config: AlgorithmConfig) -> Tensor:
    """[2]: groups without members that are known, and all groups."""
    whole, known = t.group_ids.unique(), t.group_ids[_known_members(t, config)].unique()
    return _pair(len(whole) - len(known), len(whole))


def _task_groups(task_ids: Sequence[Tensor | None], tasks: Tensor | None) -> Groups | None:
    """Which of ``tasks`` (None: of those that occur) each member is of; None where there are no tasks."""
    known = [ids for ids in task_ids if ids is not None]
    if not known:
        return None
    groups = Groups.of(torch.cat(known))
    if tasks is None:
        return groups
    places = torch.searchsorted(tasks, groups.ids)
    sizes = torch.zeros_like(tasks).index_add_(0, places, groups.sizes)
    return Groups(ids=tasks, member_of=places[groups.member_of], sizes=sizes)


def _pair(total: Tensor | float, count: float) -> Tensor:
    return torch.tensor([float(total), float(count)], dtype=torch.float64)


def _cat(parts: list[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], dict):
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(parts)


def minibatches(all_ids: Tensor, own_ids: Tensor, *, seed: int, step: int, epochs: int, count: int) -> Iterator[Tensor]:
    """Passes over a training step's samples, each in an order drawn for this step and pass.

    The order is drawn over the samples of *all* ranks by their ids, and each rank takes those that are its own: what an
    optimiser step sees does not depend on the number of ranks. Ranks' shares differ in size.

    Args:
        all_ids: sample ids of all ranks, in any order.
        own_ids: those of this rank, in any order; all of them are in ``all_ids``.
        count: optimiser steps of a pass; fewer where there are fewer samples.

    Yields:
        This rank's part of each mini-batch as indices into ``own_ids``; it may be empty. Nothing if there is no sample.
    """
    if not len(all_ids):
        return
    place = np.full(len(all_ids), -1)  # in own_ids, in ascending order of ids; -1 for those of other ranks
    place[np.searchsorted(np.sort(all_ids.numpy()), own_ids.numpy())] = np.arange(len(own_ids))
    for epoch in range(epochs):
        permuted = place[generator(seed, step, epoch).permutation(len(place))]
        for part in np.array_split(permuted, min(count, len(permuted))):
            yield torch.from_numpy(part[part >= 0])
