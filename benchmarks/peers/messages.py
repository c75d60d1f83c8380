"""What the race of channels sends. Both environments use it; it imports only torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGE_BYTES, LARGE_PARTS = 10 * 2**20, 8
SMALL_BYTES = 2**10
IN_FLIGHT = 2


def large_message() -> dict[str, Tensor]:
    count = LARGE_BYTES // LARGE_PARTS // 4
    return {f"tensor {i}": torch.full((count,), float(i)) for i in range(LARGE_PARTS)}


def small_message() -> dict[str, Tensor]:
    return {"tensor": torch.zeros(SMALL_BYTES // 4)}
