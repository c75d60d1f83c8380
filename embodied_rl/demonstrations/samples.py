"""From demonstrated frames to the trajectory that the actor trains on: each frame starts one chunk of actions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import Trajectory
from embodied_rl.seeding import generator


def frames_of_step(num_frames: int, *, seed: int, step: int, batch_size: int) -> Tensor:
    """[batch_size] int64: the frames of a training step.

    Passes over the data set follow each other without a gap, each in an order of its own, and every pass has each frame
    once. A function of its arguments alone, so a run that goes on draws what it would have drawn.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = places // num_frames
    frames = np.empty_like(places)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        frames[inside] = _order(num_frames, seed, int(epoch))[places[inside] % num_frames]
    return torch.from_numpy(frames)


@lru_cache(maxsize=4)
def _order(num_frames: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return generator(seed, epoch).permutation(num_frames)


def demonstration_trajectory(
    *, places: Tensor, replay_inputs: Mapping[str, Tensor], valid: Tensor, action_dim: int, policy_version: int
) -> Trajectory:
    """T=1: N chunks, each a group of its own, without rewards.

    Args:
        places: [N] int64, in the training step's batch.
        replay_inputs: each [N,...].
        valid: [N,C] bool: the steps before the episode's end.
    """
    n, c = valid.shape
    no_end = torch.zeros(1, n, c, dtype=torch.bool)
    return Trajectory(
        env_ids=places,
        group_ids=places,
        rollout_epoch=0,
        rewards=torch.zeros(1, n, c),
        scores=torch.zeros(n),
        terminated=no_end,
        truncated=no_end,
        valid=valid[None],
        logprobs=torch.zeros(1, n, c, action_dim),
        values=None,
        bootstrap_values=None,
        replay_inputs={key: tensor[None] for key, tensor in replay_inputs.items()},
        policy_versions=torch.tensor([policy_version]),
    )
