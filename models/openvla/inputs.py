"""From camera images and instructions to what the network was trained on, in batches.

Published checkpoints saw pictures that went through JPEG (the data sets' files), a Lanczos filter to 224×224 and a
random crop of 90 % of the area; at inference the crop is in the middle. Filters are matrices here, one for rows and one
for columns.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import simplejpeg
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from embodied_rl.errors import UserError

CROPPED_AREA = 0.9
JPEG_QUALITY = 95
BOS, EOS, PAD = 1, 2, 32000
_REMEMBERED = 4096
"""Prompts; with ``data.augmentation.words`` hardly any comes twice."""
SPACE = 29871
"""The empty word of Llama's vocabulary, with which every prompt ends: training data have it before the actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProfile:
    """Processing of the images."""

    size: int
    """Height and width that the network sees."""
    jpeg: bool
    """Encode as JPEG and decode, whatever the size."""
    resize: Literal["lanczos3", "bicubic"]
    center_crop: bool

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [N,H,W,3] -> uint8 [N,size,size,3]."""
        height, width = images.shape[1:3]
        if self.jpeg:
            images = jpeg_round_trip(images)
        if (height, width) != (self.size, self.size):
            rows, columns = (resize_matrix(side, self.size, self.resize) for side in (height, width))
            images = _apply(rows, columns, images).round().clamp(0, 255).to(torch.uint8)
        if self.center_crop:
            matrix = crop_matrix(self.size, CROPPED_AREA)
            # TensorFlow's conversion to uint8: x·255.5 of x in [0, 1], cut off.
            images = (_apply(matrix, matrix, images) * (255.5 / 255.0)).clamp(0, 255).to(torch.uint8)
        return images


def jpeg_round_trip(images: Tensor) -> Tensor:
    """uint8 [N,H,W,3] -> uint8 [N,H,W,3], encoded and decoded as TensorFlow calls libjpeg: with the accurate cosine
    transform to encode and the fast one to decode."""
    decoded = torch.empty(images.shape, dtype=torch.uint8)
    for row, image in enumerate(images.cpu().numpy()):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
        decoded[row] = torch.from_numpy(simplejpeg.decode_jpeg(file.getvalue(), fastdct=True))
    return decoded.to(images.device)


@functools.cache
def resize_matrix(size: int, new_size: int, kernel: str) -> Tensor:
    """[new_size,size] float32: each row the weights of one new pixel, with antialiasing."""
    function, radius = _KERNELS[kernel]
    scale = size / new_size
    spread = max(scale, 1.0)
    centres = (torch.arange(new_size, dtype=torch.float64) + 0.5) * scale
    distances = (torch.arange(size, dtype=torch.float64) + 0.5 - centres[:, None]) / spread
    weights = torch.where(distances.abs() < radius, function(distances), 0.0)
    return (weights / weights.sum(1, keepdim=True)).float()


@functools.cache
def crop_matrix(size: int, area: float) -> Tensor:
    """[size,size] float32: the middle part of a side, √area of it, stretched to the whole, linearly between pixels and
    from corner to corner (TensorFlow's ``crop_and_resize``)."""
    part = math.sqrt(area)
    sources = (1.0 - part) / 2.0 * (size - 1) + torch.arange(size, dtype=torch.float64) * part
    distances = (torch.arange(size, dtype=torch.float64) - sources[:, None]).abs()
    return (1.0 - distances).clamp(min=0.0).float()


def normalize(images: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """uint8 [...,H,W,3] -> [...,6,H,W] in the type of ``means`` [2,3]: for DINOv2, then for SigLIP."""
    x = images.movedim(-1, -3).to(means.dtype)[..., None, :, :, :] / 255.0
    return ((x - means[..., None, None]) / stds[..., None, None]).flatten(-4, -3)


def prompt_text(instruction: str) -> str:
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


class PromptTokenizer:
    """Tokenises each instruction once.

    Args:
        tokenizer: the checkpoint's, which puts BOS first.
        max_tokens: length that prompts are padded to.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._known: dict[str, Tensor] = {}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """[N,max_tokens] int64: BOS, padding, the rest of the prompt.

        Raises:
            UserError: a prompt is too long.
        """
        return torch.stack([self._row(instruction) for instruction in instructions])

    def ids(self, instruction: str) -> list[int]:
        """Without padding."""
        ids = self._tokenizer.encode(prompt_text(instruction)).ids
        ids = ids if ids[:1] == [BOS] else [BOS, *ids]
        return ids if ids[-1] == SPACE else [*ids, SPACE]

    def _row(self, instruction: str) -> Tensor:
        if instruction not in self._known:
            ids = self.ids(instruction)
            room = self._max_tokens - len(ids)
            if room < 0:
                raise UserError(
                    f"instruction {instruction!r} makes a prompt of {len(ids)} tokens, expected at most "
                    f"{self._max_tokens}; raise model.params.max_prompt_tokens"
                )
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[instruction] = torch.tensor([BOS, *[PAD] * room, *ids[1:]])
        return self._known[instruction]


def trim(prompts: Tensor) -> Tensor:
    """[N,L] without the columns that are padding in all rows."""
    longest = int((prompts != PAD).sum(1).max())
    return torch.cat([prompts[:, :1], prompts[:, prompts.shape[1] - longest + 1 :]], 1)


def _apply(rows: Tensor, columns: Tensor, images: Tensor) -> Tensor:
    rows, columns = rows.to(images.device), columns.to(images.device)
    return torch.einsum("oh,nhwc,pw->nopc", rows, images.float(), columns)


def _lanczos3(x: Tensor) -> Tensor:
    return torch.sinc(x) * torch.sinc(x / 3.0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2, as in Pillow."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return torch.where(x < 1.0, near, far)


_KERNELS: Mapping[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "lanczos3": (_lanczos3, 3.0),
    "bicubic": (_cubic, 2.0),
}
