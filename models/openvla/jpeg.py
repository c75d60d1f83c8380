"""What JPEG does to pictures, in batches and without files: colour conversion, halved colour resolution, quantisation.

ITU-T T.81 and JFIF 1.02, with the choices of libjpeg at quality 95 (TensorFlow's default), 4:2:0.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

QUALITY = 95
_TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168735892, -0.331264108, 0.5), (0.5, -0.418687589, -0.081312411))
_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136286, -0.714136286), (1.0, 1.772, 0.0))
# Annex K of T.81, rows by vertical frequency.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)


def jpeg_round_trip(images: Tensor) -> Tensor:
    """uint8 [N,H,W,3] -> uint8 [N,H,W,3], encoded and decoded."""
    height, width = images.shape[1:3]
    x = images.permute(0, 3, 1, 2).float()
    # Whole blocks of 16×16, by repeating the last row and column.
    x = functional.pad(x, (0, -width % 16, 0, -height % 16), mode="replicate")
    ycc = torch.einsum("ij,njhw->nihw", _table(_TO_YCBCR, x), x)
    ycc = (ycc + torch.tensor([0.0, 128.0, 128.0], device=x.device)[:, None, None]).round()
    luminance = _quantized(ycc[:, :1], _LUMINANCE)
    # libjpeg rounds the mean of four up and down in turns.
    sums = functional.avg_pool2d(ycc[:, 1:], 2) * 4.0
    bias = 1.0 + torch.arange(sums.shape[3], device=x.device) % 2
    colours = _quantized(((sums + bias) / 4.0).floor(), _CHROMINANCE)
    colours = colours[:, :, : -(-height // 2), : -(-width // 2)]
    decoded = torch.cat([luminance[:, :, :height, :width], _upsampled(colours)[:, :, :height, :width] - 128.0], 1)
    rgb = torch.einsum("ij,njhw->nihw", _table(_TO_RGB, x), decoded)
    return rgb.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _quantized(planes: Tensor, table: tuple[tuple[int, ...], ...]) -> Tensor:
    """Planes [N,C,H,W] as a decoder sees them: each 8×8 block's cosine transform rounded to multiples of the table."""
    scale = 200 - 2 * QUALITY
    steps = ((_table(table, planes) * scale + 50.0) / 100.0).floor().clamp(1, 255)
    transform = _cosines().to(planes.device)
    blocks = planes.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)) - 128.0
    coefficients = torch.einsum("uy,ncayxw,vw->ncauxv", transform, blocks, transform)
    steps = steps[:, None, :]
    coefficients = (coefficients / steps).round() * steps
    blocks = torch.einsum("uy,ncauxv,vw->ncayxw", transform, coefficients, transform)
    return (blocks + 128.0).round().clamp(0, 255).flatten(-2, -1).flatten(-3, -2)


def _upsampled(planes: Tensor) -> Tensor:
    """Twice the size, each new pixel 3/4 of the nearest and 1/4 of the next along each axis (libjpeg's "fancy" way)."""
    padded = functional.pad(planes, (1, 1, 1, 1), mode="replicate")
    rows = torch.stack([3.0 * padded[:, :, 1:-1] + padded[:, :, :-2], 3.0 * padded[:, :, 1:-1] + padded[:, :, 2:]], 3)
    rows = rows.flatten(2, 3)
    middle, left, right = 3.0 * rows[..., 1:-1], rows[..., :-2], rows[..., 2:]
    # Rounded up and down in turns.
    return torch.stack([(middle + left + 8.0) / 16.0, (middle + right + 7.0) / 16.0], 4).floor().flatten(3)


@functools.cache
def _cosines() -> Tensor:
    """[8,8] orthonormal, rows by frequency."""
    frequency, place = torch.arange(8.0)[:, None], torch.arange(8.0)
    matrix = torch.cos(math.pi / 8.0 * (place + 0.5) * frequency) / 2.0
    matrix[0] /= math.sqrt(2.0)
    return matrix


def _table(values: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
