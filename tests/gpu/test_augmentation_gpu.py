"""Pictures that are changed on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_rl.demonstrations.augmentation import augment
from embodied_rl.schema import AugmentationConfig

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHIFTED = AugmentationConfig(random_shift=4, brightness=0.0, contrast=0.0, saturation=0.0, words=0.0)
ALL = replace(SHIFTED, brightness=0.2, contrast=0.2, saturation=0.2)


@pytest.mark.parametrize(("config", "rounding"), [(SHIFTED, 0), (ALL, 1)], ids=["shifted", "all"])
def test_a_device_changes_pictures_as_the_cpu_does(config: AugmentationConfig, rounding: int) -> None:
    images = torch.randint(256, (96, 40, 48, 3), dtype=torch.uint8)
    changes: dict[str, Any] = {"seed": 3, "step": 5, "positions": torch.arange(7, 103), "batch_size": 128}
    here = augment({"agentview": images}, config, **changes)["agentview"]
    there = augment({"agentview": images.cuda()}, config, **changes)["agentview"]
    assert there.is_cuda
    assert (here.int() - images.int()).abs().float().mean() > 10
    assert (here.int() - there.cpu().int()).abs().max() <= rounding
