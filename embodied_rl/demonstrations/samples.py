"""Training samples from recorded episodes: which frames a step takes, random changes of their images, the trajectory.

Each is a function of seed, step and a sample's position in the step's batch: any number of workers gives the same, and
a resumed run draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import Trajectory
from embodied_rl.schema import AugmentationConfig
from embodied_rl.seeding import generator

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a pixel's grey (ITU-R BT.601)."""
_AT_ONCE = 64
"""Images in float32 at a time."""


def frames_of_step(num_frames: int, *, seed: int, step: int, batch_size: int) -> Tensor:
    """[batch_size] int64: the frames of a training step.

    Passes over the data set follow each other without a gap, each in an order of its own, and every pass has each frame
    once.
    """
    drawn = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = drawn // num_frames
    frames = np.empty_like(drawn)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        frames[inside] = _order(num_frames, seed, int(epoch))[drawn[inside] % num_frames]
    return torch.from_numpy(frames)


@lru_cache(maxsize=4)
def _order(num_frames: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return generator(seed, epoch).permutation(num_frames)


def demonstration_trajectory(
    *, positions: Tensor, replay_inputs: Mapping[str, Tensor], valid: Tensor, action_dim: int, policy_version: int
) -> Trajectory:
    """T=1: N chunks, each a group of its own, without rewards.

    Args:
        positions: [N] int64, in the training step's batch.
        replay_inputs: each [N,...].
        valid: [N,C] bool: the steps before the episode's end.
    """
    n, c = valid.shape
    no_end = torch.zeros(1, n, c, dtype=torch.bool)
    return Trajectory(
        env_ids=positions,
        group_ids=positions,
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


def augment(
    images: Mapping[str, Tensor],
    config: AugmentationConfig,
    *,
    seed: int,
    step: int,
    positions: Tensor,
    batch_size: int,
) -> dict[str, Tensor]:
    """Camera -> [N,H,W,3] uint8, changed; the given tensors themselves where nothing is asked for.

    Args:
        images: camera -> [N,H,W,3] uint8.
        positions: [N] int64, the samples' in the batch of ``batch_size``.
    """
    rng = generator(seed, step, 1)
    # Drawn for the whole batch and all that could be asked for, so that no setting changes another's draws.
    colours = torch.from_numpy(rng.uniform(-1.0, 1.0, (batch_size, 3)).astype(np.float32))[positions]
    factors = 1.0 + colours * torch.tensor([config.brightness, config.contrast, config.saturation])
    changed: dict[str, Tensor] = {}
    for camera, image in sorted(images.items()):
        unit = torch.from_numpy(rng.random((batch_size, 2)))[positions]
        if config.random_shift:
            size = 2 * config.random_shift + 1
            image = shift(image, (unit * size).long() - config.random_shift)
        if config.brightness or config.contrast or config.saturation:
            parts = zip(image.split(_AT_ONCE), factors.split(_AT_ONCE), strict=True)
            image = torch.cat([jitter(part, factor) for part, factor in parts])
        changed[camera] = image
    return changed


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Images moved by whole pixels; the border is repeated (random shift of DrQ, arXiv:2004.13649).

    Args:
        images: [N,H,W,3].
        offsets: [N,2] int64: down and right.
    """
    n, height, width, _ = images.shape
    rows = (torch.arange(height) - offsets[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width) - offsets[:, 1:]).clamp(0, width - 1)
    return images[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, then contrast about the image's mean grey, then saturation about each pixel's grey.

    Args:
        images: [N,H,W,3] uint8.
        factors: [N,3]: of brightness, contrast and saturation; 1 leaves as it is.
    """
    luma = torch.tensor(_LUMA)
    brightness, contrast, saturation = (factors[:, i, None, None, None] for i in range(3))
    x = images.float() * brightness
    x = torch.lerp((x @ luma).mean((1, 2))[:, None, None, None], x, contrast)
    x = torch.lerp((x @ luma)[..., None], x, saturation)
    return x.round_().clamp_(0.0, 255.0).to(torch.uint8)
