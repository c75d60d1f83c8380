"""What a safetensors file holds, without its tensors: https://github.com/huggingface/safetensors#format. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LARGEST_HEADER: Final = 100 * 2**20
"""Bytes, as in the library."""


class DamagedError(ValueError):
    """Not a whole safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    dtype: str
    """As in the file: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> Mapping[str, TensorInfo]:
    """Tensor -> its type and shape.

    Raises:
        DamagedError: the file is cut off, or something else.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _LARGEST_HEADER:
            raise DamagedError("it has no header")
        text = file.read(size)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(dtype=e["dtype"], shape=tuple(e["shape"])) for name, e in header.items()}
        end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedError("its header is cut off or no JSON") from error
    actual = os.path.getsize(path)
    if actual != end:
        raise DamagedError(f"it has {actual} bytes, expected {end}")
    return tensors
