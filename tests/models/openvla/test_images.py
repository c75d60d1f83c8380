from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from embodied_rl.models.openvla.inputs import ImageProfile, crop_matrix, jpeg_round_trip, normalize, resize_matrix


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours, sharp edges, some noise."""
    rng = np.random.default_rng(seed)
    coarse = (rng.random((height // 16 + 2, width // 16 + 2, 3)) * 255).astype(np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    image[height // 4 : height // 2, width // 4 : width // 2] = [200, 30, 60]
    return np.clip(image + rng.normal(0, 3, image.shape), 0, 255).astype(np.uint8)


def batch(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.copy())[None]


def profile(size: int = 56, **fields: bool | str) -> ImageProfile:
    return ImageProfile(**{"size": size, "jpeg": False, "resize": "lanczos3", "center_crop": False, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["lanczos3", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(128, 128), (100, 70), (40, 40)])
def test_resizing_is_pillows(kernel: str, height: int, width: int) -> None:
    image = picture(height, width)
    filters = {"lanczos3": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}
    expected = np.asarray(Image.fromarray(image).resize((56, 56), filters[kernel])).astype(int)
    got = profile(resize=kernel)(batch(image))
    assert got.shape == (1, 56, 56, 3)
    assert got.dtype == torch.uint8
    error = np.abs(got[0].numpy().astype(int) - expected)
    assert error.max() <= 2  # Pillow rounds between rows and columns
    assert error.mean() < 0.3


def test_each_new_pixel_is_a_mean() -> None:
    for kernel in ("lanczos3", "bicubic"):
        assert torch.allclose(resize_matrix(100, 30, kernel).sum(1), torch.ones(30), atol=1e-6)
    assert torch.allclose(crop_matrix(30, 0.9).sum(1), torch.ones(30), atol=1e-6)


def test_the_crop_by_hand() -> None:
    """Of a ramp, the crop's corners lie (1-√0.9)/2 of the side from the ramp's, and the middle stays."""
    size = 225
    ramp = torch.arange(size).to(torch.uint8)[None, None, :, None].expand(1, size, size, 3)
    row = profile(size, center_crop=True)(ramp)[0, 7, :, 0]
    margin = (1 - math.sqrt(0.9)) / 2 * 224
    expected = [math.floor((margin + i * math.sqrt(0.9)) * 255.5 / 255) for i in range(size)]
    assert np.abs(row.numpy().astype(int) - expected).max() <= 1
    assert row[0] == 5 and row[112] == 112 and row[224] == 218
    flat = torch.full((1, size, size, 3), 255, dtype=torch.uint8)
    assert torch.equal(profile(size, center_crop=True)(flat), flat)


def test_jpeg_whatever_the_size() -> None:
    """As upstream's evaluations do: their data are JPEG files."""
    image = batch(picture(56, 56))
    assert torch.equal(profile()(image), image)
    assert torch.equal(profile(jpeg=True)(image), jpeg_round_trip(image))
    assert torch.equal(
        profile(jpeg=True)(batch(picture(128, 128))), profile()(jpeg_round_trip(batch(picture(128, 128))))
    )


def test_a_batch_is_its_images() -> None:
    images = torch.cat([batch(picture(100, 70, seed)) for seed in range(3)])
    whole = profile(jpeg=True, center_crop=True)(images)
    for row in range(3):
        assert torch.equal(profile(jpeg=True, center_crop=True)(images[row : row + 1])[0], whole[row])


def test_normalisation_by_hand() -> None:
    means, stds = torch.tensor([[0.5, 0.4, 0.2], [0.5] * 3]), torch.tensor([[0.25, 0.5, 0.1], [0.5] * 3])
    image = torch.zeros(1, 1, 2, 2, 3, dtype=torch.uint8)
    image[0, 0, 1, 0] = torch.tensor([255, 51, 0])
    got = normalize(image, means, stds)
    assert got.shape == (1, 1, 6, 2, 2)
    assert torch.allclose(got[0, 0, :, 1, 0], torch.tensor([2.0, -0.4, -2.0, 1.0, -0.6, -1.0]), atol=1e-6)
