"""The memory that received messages live in."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_LARGE = 64 * 1024


def copy_of(source: Bytes) -> Bytes:
    """``source``, copied into memory of its own."""
    if source.nbytes < _LARGE:
        return source.copy()
    # torch copies a megabyte about a fifth faster than memcpy does.
    return torch.from_numpy(source).clone().numpy()
