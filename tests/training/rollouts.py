"""Rollouts made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from embodied_rl.contracts import Trajectory
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import build_policy

STATE_DIM, ACTION_DIM, CHUNK = 4, 2, 3


def small_policy(values_per_chunk: int = 0, *, hidden_size: int = 16, seed: int = 0) -> Policy:
    """An ``mlp`` for the rollouts of this module."""
    torch.manual_seed(seed)
    spec = PolicySpec(
        action_dim=ACTION_DIM,
        num_action_chunks=CHUNK,
        state_dim=STATE_DIM,
        image_shapes={},
        values_per_chunk=values_per_chunk,
    )
    return build_policy("mlp", spec, {"hidden_size": hidden_size})


def rollout(
    policy: Policy,
    *,
    num_envs: int = 10,
    num_chunks: int = 4,
    group_size: int = 2,
    first_env: int = 0,
    rollout_epoch: int = 0,
    groups_per_epoch: int = 100,
    lengths: Sequence[int] | None = None,
    end: Literal["terminated", "truncated"] = "terminated",
    off_policy: float = 0.1,
) -> Trajectory:
    """A trajectory of ``policy`` with random states and rewards, a function of the env ids and of the epoch alone.

    Args:
        lengths: steps of each env's episode; None draws them. Steps beyond are not valid.
        off_policy: deviation of the recorded log-probabilities from the policy's.
    """
    v = policy.spec.values_per_chunk
    steps = num_chunks * CHUNK
    env_ids = torch.arange(first_env, first_env + num_envs)
    rows = []
    for place, env_id in enumerate(env_ids.tolist()):
        rng = torch.Generator().manual_seed(1000 * rollout_epoch + env_id)
        drawn = int(torch.randint(1, steps + 1, (), generator=rng))
        rows.append(
            {
                "length": torch.tensor(drawn if lengths is None else lengths[place]),
                "state": torch.randn(num_chunks, STATE_DIM, generator=rng),
                "samples": 0.5 * torch.randn(num_chunks, CHUNK, ACTION_DIM, generator=rng),
                "rewards": torch.randn(num_chunks, CHUNK, generator=rng),
                "scores": torch.tensor(float(env_id % 2)),
                "noise": off_policy * torch.randn(num_chunks, CHUNK, ACTION_DIM, generator=rng),
                "values": torch.randn(num_chunks, v, generator=rng),
                "bootstrap": torch.randn(num_chunks, generator=rng),
            }
        )
    columns = {name: torch.stack([row[name] for row in rows], dim=min(rows[0][name].ndim, 1)) for name in rows[0]}
    time = torch.arange(steps).view(num_chunks, 1, CHUNK)
    valid = time < columns["length"][None, :, None]
    ended = time == columns["length"][None, :, None] - 1
    inputs = {"state": columns["state"], "samples": columns["samples"]}
    with torch.no_grad():
        flat = {key: tensor.flatten(0, 1) for key, tensor in inputs.items()}
        logprobs = policy.evaluate(flat, temperature=1.0).logprobs.unflatten(0, (num_chunks, num_envs))
    never = torch.zeros_like(ended)
    return Trajectory(
        env_ids=env_ids,
        group_ids=rollout_epoch * groups_per_epoch + env_ids // group_size,
        rollout_epoch=rollout_epoch,
        rewards=columns["rewards"] * valid,
        scores=columns["scores"],
        terminated=ended if end == "terminated" else never,
        truncated=ended if end == "truncated" else never,
        valid=valid,
        logprobs=logprobs + columns["noise"],
        values=columns["values"] if v else None,
        bootstrap_values=columns["bootstrap"] if v else None,
        replay_inputs=inputs,
        policy_versions=torch.arange(num_chunks)[:, None].expand(valid.shape[:2]),
    )
