"""From trajectories to training samples: advantages, masks and the order in which the optimiser sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import AdvantageInputs, estimate_advantages
from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.algorithms.filters import group_filter
from embodied_rl.algorithms.granularity import broadcast_to_level, mask_at_level, reduce_to_level
from embodied_rl.algorithms.groups import rollout_scores
from embodied_rl.algorithms.normalization import Reduce, normalize_advantages
from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.schema import AlgorithmConfig

ID_ROOM = 1 << 20
"""Envs, and chunks per rollout, that sample ids have room for."""


def build_train_batch(
    trajectories: Sequence[Trajectory], config: AlgorithmConfig, *, reduce: Reduce | None = None
) -> tuple[TrainBatch, dict[str, Tensor]]:
    """One rank's samples of a training step: every chunk with a valid step in a kept group, and what to report of them.

    Each trajectory holds whole groups, so estimators that compare group members see them all.

    Args:
        reduce: sums a float64 tensor over all ranks; None for one rank.

    Returns:
        The batch and, for the metrics, float64 pairs [2] of (sum, count): ``groups_filtered``, ``groups_equal``.

    Raises:
        ValueError: no trajectory at all.
    """
    if not trajectories:
        raise ValueError("no trajectory to train on: there are fewer groups than actor ranks")
    parts = [_samples(trajectory, config) for trajectory in trajectories]
    fields = {key: _cat([part[key] for part in parts]) for key in parts[0] if key != "groups"}
    advantages, unit_mask = fields.pop("unit_advantages"), fields.pop("unit_mask")
    if config.normalize_advantages and ADVANTAGES[config.adv_type].batch_normalized:
        advantages = normalize_advantages(advantages, unit_mask, reduce=reduce)
    fields["advantages"] = broadcast_to_level(
        advantages,
        config.reward_type,
        config.logprob_type,
        num_action_chunks=trajectories[0].logprobs.shape[-2],
        action_dim=trajectories[0].logprobs.shape[-1],
    ).contiguous()
    groups = {name: torch.stack([part["groups"][name] for part in parts]).sum(0) for name in parts[0]["groups"]}
    batch = TrainBatch(**fields)
    # A filtered group's chunks carry no gradient. One sample always stays, masked: without any to compute on, a rank
    # could not take part in the collectives of the others.
    trainable = batch.trainable()
    return batch.select(trainable if len(trainable) else torch.zeros(1, dtype=torch.int64)), groups


def _samples(t: Trajectory, config: AlgorithmConfig) -> dict[str, Any]:
    """A trajectory's valid chunks, flat, with advantages still at the reward level."""
    options = {name: getattr(config, name) for name in ADVANTAGES[config.adv_type].options}
    estimate = estimate_advantages(
        config.adv_type,
        AdvantageInputs(
            reward_level=config.reward_type,
            rewards=t.rewards,
            terminated=t.terminated,
            truncated=t.truncated,
            valid=t.valid,
            group_ids=t.group_ids,
            values=t.values,
            bootstrap_values=t.bootstrap_values,
        ),
        options,
    )
    scores = rollout_scores(t.rewards, t.valid)
    kept = torch.ones_like(scores, dtype=torch.bool)
    if config.filter_rewards:
        kept = group_filter(
            scores,
            t.group_ids,
            rewards_lower_bound=config.rewards_lower_bound,
            rewards_upper_bound=config.rewards_upper_bound,
        )
    valid = t.valid & kept[None, :, None]
    flat = t.valid.any(-1)  # [T,N]: chunks in which anything happened
    chunk_numbers = torch.arange(len(t.rewards))[:, None].expand_as(flat)
    ids = (t.rollout_epoch * ID_ROOM + t.env_ids)[None, :].expand_as(flat) * ID_ROOM + chunk_numbers
    unit_mask = valid.any(-1) if config.reward_type == "chunk_level" else valid
    return {
        "sample_ids": ids[flat],
        "replay_inputs": {key: tensor[flat] for key, tensor in t.replay_inputs.items()},
        "logprobs": reduce_to_level(t.logprobs[flat], valid[flat], config.logprob_type),
        "loss_mask": mask_at_level(valid[flat], config.logprob_type, t.logprobs.shape[-1]).contiguous(),
        "valid": valid[flat],
        "values": None if t.values is None else t.values[flat],
        "returns": None if estimate.returns is None else estimate.returns[flat],
        "value_mask": None if estimate.returns is None else unit_mask[flat].reshape(int(flat.sum()), -1),
        "policy_version": t.policy_versions[:, None].expand_as(flat)[flat],
        "unit_advantages": estimate.advantages[flat],
        "unit_mask": unit_mask[flat],
        "groups": _group_counts(scores, kept, t.group_ids),
    }


def _group_counts(scores: Tensor, kept: Tensor, group_ids: Tensor) -> dict[str, Tensor]:
    groups = [scores[group_ids == group] for group in torch.unique(group_ids)]
    equal = sum(bool((group == group[0]).all()) for group in groups)
    filtered = sum(not bool(kept[group_ids == group].any()) for group in torch.unique(group_ids))
    count = float(len(groups))
    return {
        "groups_equal": torch.tensor([float(equal), count], dtype=torch.float64),
        "groups_filtered": torch.tensor([float(filtered), count], dtype=torch.float64),
    }


def _cat(parts: list[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], dict):
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(parts)


def minibatches(all_ids: Tensor, own_ids: Tensor, *, seed: int, step: int, epoch: int, count: int) -> Iterator[Tensor]:
    """One pass over a training step's samples, in an order drawn for this (step, epoch).

    The order is drawn over the samples of *all* ranks by their ids, and each rank takes those that are its own: what an
    optimiser step sees does not depend on the number of ranks. Ranks' shares differ in size.

    Args:
        all_ids: sample ids of all ranks, in any order.
        own_ids: those of this rank, in any order; all of them are in ``all_ids``.
        count: optimiser steps; fewer where there are fewer samples.

    Yields:
        This rank's part of each mini-batch as places in ``own_ids``; it may be empty. Nothing if there is no sample.
    """
    if not len(all_ids):
        return
    ordered = np.sort(all_ids.numpy())
    rng = np.random.default_rng(np.random.SeedSequence([seed, step, epoch]))
    permuted = ordered[rng.permutation(len(ordered))]
    own = own_ids.numpy()
    by_id = np.argsort(own)
    for part in np.array_split(permuted, min(count, len(permuted))):
        mine = part[np.isin(part, own)]
        yield torch.from_numpy(by_id[np.searchsorted(own, mine, sorter=by_id)])
