"""What JPEG does to pictures, in batches and without files: colour conversion, halved colour resolution, quantisation.

ITU-T T.81 and JFIF 1.02 at quality 95, 4:2:0, with the whole-number arithmetic of libjpeg as TensorFlow calls it: the
accurate cosine transform (Loeffler, Ligtenberg, Moschytz 1989) to encode, the fast one (Arai, Agui, Nakajima 1988) to
decode. Equal to TensorFlow's pixels, bit for bit.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

QUALITY = 95
_COLOUR_BITS = 16
_TO_YCBCR = ((19595, 38470, 7471), (-11059, -21709, 32768), (32768, -27439, -5329))
_RED, _GREEN_BLUE, _GREEN_RED, _BLUE = 91881, 22554, 46802, 116130
"""1.402, 0.34414, 0.71414 and 1.772 with 16 bits after the point, as those above."""
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
# The accurate transform as a matrix: of the sums (even rows) and differences (odd rows) of x[i] and x[7-i], 13 bits.
# That entries of one absolute value differ in the last digit is from the rounded factors of the fast algorithm.
_EVEN = (
    (8192, 8192, 8192, 8192),
    (10703, 4433, -4433, -10703),
    (8192, -8192, -8192, 8192),
    (4433, -10704, 10704, -4433),
)
_ODD = (
    (11363, 9633, 6437, 2260),
    (9633, -2259, -11362, -6436),
    (6437, -11362, 2261, 9633),
    (2260, -6436, 9633, -11363),
)


def jpeg_round_trip(images: Tensor) -> Tensor:
    """uint8 [N,H,W,3] -> uint8 [N,H,W,3], encoded and decoded."""
    height, width = images.shape[1:3]
    rgb = images.permute(0, 3, 1, 2).int()
    # Rows and columns to whole blocks repeat the last one; those of colours repeat it after halving.
    rgb = _extended(rgb, height + height % 2, width + -width % 16)
    ycc = _ycbcr(rgb)
    luminance = _quantized(_extended(ycc[:, :1], height + -height % 8, ycc.shape[3]), _LUMINANCE)
    squares = ycc[:, 1:].unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).sum((3, 5), dtype=torch.int32)
    # The mean of four is rounded up and down in turns.
    halved = (squares + 1 + torch.arange(squares.shape[3], device=rgb.device) % 2) >> 2
    rows, columns = -(-height // 2), -(-width // 2)
    colours = _quantized(_extended(halved, rows + -rows % 8, halved.shape[3]), _CHROMINANCE)[:, :, :rows, :columns]
    decoded = torch.cat([luminance[:, :, :height, :width], _upsampled(colours)[:, :, :height, :width] - 128], 1)
    return _rgb(decoded).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _ycbcr(rgb: Tensor) -> Tensor:
    """int32 [N,3,H,W] -> int32 [N,3,H,W], colours about 128."""
    red, green, blue = rgb.unbind(1)
    half = 1 << (_COLOUR_BITS - 1)
    # Colours are rounded down at exactly one half.
    offsets = (half, (128 << _COLOUR_BITS) + half - 1, (128 << _COLOUR_BITS) + half - 1)
    return torch.stack(
        [
            (a * red + b * green + c * blue + offset) >> _COLOUR_BITS
            for (a, b, c), offset in zip(_TO_YCBCR, offsets, strict=True)
        ],
        1,
    )


def _rgb(ycc: Tensor) -> Tensor:
    """int32 [N,3,H,W] -> int32 [N,3,H,W]; colours about 0."""
    luminance, blueness, redness = ycc.unbind(1)
    half = 1 << (_COLOUR_BITS - 1)
    red = luminance + ((_RED * redness + half) >> _COLOUR_BITS)
    green = luminance + ((half - _GREEN_BLUE * blueness - _GREEN_RED * redness) >> _COLOUR_BITS)
    blue = luminance + ((_BLUE * blueness + half) >> _COLOUR_BITS)
    return torch.stack([red, green, blue], 1)


def _quantized(planes: Tensor, table: tuple[tuple[int, ...], ...]) -> Tensor:
    """int32 planes [N,C,H,W] as a decoder sees them: each 8×8 block's cosine transform rounded to the table's steps."""
    steps = (torch.tensor(table, device=planes.device) * (200 - 2 * QUALITY) + 50) // 100
    steps = steps.clamp(1, 255).int()
    blocks = planes.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).transpose(-3, -2) - 128
    coefficients = _transformed(blocks)
    # The transform's numbers are eight times as large.
    levels = coefficients.sign() * ((coefficients.abs() + 4 * steps) // (8 * steps))
    blocks = _restored(levels * _fast_steps(steps)) + 128
    return blocks.clamp(0, 255).transpose(-3, -2).flatten(-2, -1).flatten(-3, -2)


def _transformed(blocks: Tensor) -> Tensor:
    """int32 [...,8,8] -> 8 times their cosine transform, int32 [...,8,8]."""
    matrix = _cosines().to(blocks.device)
    # In float64, in which these whole numbers are exact: no device multiplies integer matrices as fast.
    rows = torch.floor((blocks.double() @ matrix.T + 2.0**10) / 2.0**11)
    return torch.floor((matrix @ rows + 2.0**14) / 2.0**15).int()


@functools.cache
def _cosines() -> Tensor:
    """[8,8] float64, rows by frequency."""
    even, odd = (torch.tensor(rows, dtype=torch.float64) for rows in (_EVEN, _ODD))
    matrix = torch.empty(8, 8, dtype=torch.float64)
    matrix[0::2] = torch.cat([even, even.flip(1)], 1)
    matrix[1::2] = torch.cat([odd, -odd.flip(1)], 1)
    return matrix


def _fast_steps(steps: Tensor) -> Tensor:
    """[8,8] int32: the quantisation's steps times the scales that the fast transform leaves out, with 2 bits."""
    scales = torch.tensor([math.cos(k * math.pi / 16) * (math.sqrt(2.0) if k else 1.0) for k in range(8)])
    fixed = (scales[:, None] * scales * 2.0**14).round().int().to(steps.device)
    return (steps * fixed + (1 << 11)) >> 12


def _restored(coefficients: Tensor) -> Tensor:
    """int32 [...,8,8] -> int32 [...,8,8], pixels about 0: the fast inverse, along columns and then along rows."""
    columns = _fast_inverse(coefficients.unbind(-2))
    return torch.stack(_fast_inverse(torch.stack(columns, -2).unbind(-1)), -1) >> 5


def _fast_inverse(x: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    """Eight frequencies -> eight places. Factors have 8 bits and products are rounded down."""
    # Even frequencies.
    sum04, difference04, sum26 = x[0] + x[4], x[0] - x[4], x[2] + x[6]
    turned26 = ((x[2] - x[6]) * 362 >> 8) - sum26  # √2
    even = (sum04 + sum26, difference04 + turned26, difference04 - turned26, sum04 - sum26)
    # Odd frequencies.
    sum53, difference53, sum17, difference17 = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    shared = (difference53 + difference17) * 473 >> 8  # 1.8478
    first = sum17 + sum53
    second = (difference53 * -669 >> 8) + shared - first  # 2.6131
    third = ((sum17 - sum53) * 362 >> 8) - second
    fourth = (difference17 * 277 >> 8) - shared + third  # 1.0824
    odd = (first, second, third, -fourth)
    return [a + b for a, b in zip(even, odd, strict=True)] + [a - b for a, b in zip(even[::-1], odd[::-1], strict=True)]


def _upsampled(planes: Tensor) -> Tensor:
    """Twice the size, each new pixel 3/4 of the nearest and 1/4 of the next along each axis (libjpeg's "fancy" way)."""
    padded = functional.pad(planes.float(), (1, 1, 1, 1), mode="replicate").int()
    rows = torch.stack([3 * padded[:, :, 1:-1] + padded[:, :, :-2], 3 * padded[:, :, 1:-1] + padded[:, :, 2:]], 3)
    rows = rows.flatten(2, 3)
    middle, left, right = 3 * rows[..., 1:-1], rows[..., :-2], rows[..., 2:]
    # Rounded up and down in turns.
    return torch.stack([(middle + left + 8) >> 4, (middle + right + 7) >> 4], 4).flatten(3)


def _extended(planes: Tensor, height: int, width: int) -> Tensor:
    """[N,C,H,W] -> [N,C,height,width]: the last row and the last column repeated."""
    rows = torch.arange(height, device=planes.device).clamp(max=planes.shape[2] - 1)
    columns = torch.arange(width, device=planes.device).clamp(max=planes.shape[3] - 1)
    return planes[:, :, rows[:, None], columns]
