"""Random changes of demonstrations: of their images, and of the words that they are asked with.

Functions of seed, step and a sample's position in the step's batch: any number of workers gives the same, and a resumed
run draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from embodied_rl.schema import AugmentationConfig
from embodied_rl.seeding import generator

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a pixel's grey (ITU-R BT.601)."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_AT_ONCE = 64
"""Images in float32 at a time."""


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
        images: camera -> [N,H,W,3] uint8, on any device: that is where they are changed.
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
            image = shift(image, ((unit * size).long() - config.random_shift).to(image.device))
        if config.brightness or config.contrast or config.saturation:
            parts = zip(image.split(_AT_ONCE), factors.to(image.device).split(_AT_ONCE), strict=True)
            image = torch.cat([jitter(part, factor) for part, factor in parts])
        changed[camera] = image
    return changed


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Images moved by whole pixels; the border is repeated (random shift of DrQ, arXiv:2004.13649).

    Args:
        images: [N,H,W,3].
        offsets: [N,2] int64: down and right.
    """
    sample, row, column = (torch.arange(size, device=images.device) for size in images.shape[:3])
    rows = (row - offsets[:, :1]).clamp(0, len(row) - 1)
    columns = (column - offsets[:, 1:]).clamp(0, len(column) - 1)
    return images[sample[:, None, None], rows[:, :, None], columns[:, None, :]]


def jitter(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, then contrast about the image's mean grey, then saturation about each pixel's grey.

    Args:
        images: [N,H,W,3] uint8.
        factors: [N,3]: of brightness, contrast and saturation; 1 leaves as it is.
    """
    luma = torch.tensor(_LUMA, device=images.device)
    brightness, contrast, saturation = (factors[:, i, None, None, None] for i in range(3))
    x = images.float() * brightness
    x = torch.lerp((x @ luma).mean((1, 2))[:, None, None, None], x, contrast)
    x = torch.lerp((x @ luma)[..., None], x, saturation)
    return x.round_().clamp_(0.0, 255.0).to(torch.uint8)


def reword(
    instructions: Sequence[str], share: float, *, seed: int, step: int, positions: Tensor, batch_size: int
) -> tuple[str, ...]:
    """Instructions of which each word is left out with probability ``share`` / 2, and with the same one replaced by a
    made-up one, which stands for words that a policy never heard. One word of each stays as it is.

    Args:
        instructions: N of them.
        positions: [N] int64, the samples' in the batch of ``batch_size``.
    """
    if not share:
        return tuple(instructions)
    said = [instruction.split() for instruction in instructions]
    rng = generator(seed, step, 3)
    seeds = rng.integers(2**63, size=batch_size)[positions.numpy()]
    changed = []
    for words, drawn in zip(said, seeds, strict=True):
        own = generator(int(drawn))
        fate, kept = own.random(len(words)), own.integers(max(1, len(words)))
        made_up = _made_up(own, len(words))
        changed.append(
            " ".join(
                word if number == kept or chance >= share else new
                for number, (word, chance, new) in enumerate(zip(words, fate, made_up, strict=True))
                if number == kept or chance >= share / 2
            )
        )
    return tuple(changed)


def _made_up(rng: np.random.Generator, count: int) -> list[str]:
    """Three letters each: a tokenizer may take every one of them for a token, and prompts have a longest length."""
    return ["".join(_LETTERS[letter] for letter in word) for word in rng.integers(len(_LETTERS), size=(count, 3))]
