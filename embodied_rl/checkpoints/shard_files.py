"""Shards of tensors in safetensors files, which cannot hold code, with torch DCP.

The layout is that of torch's ``HuggingFaceStorageWriter(save_distributed=True)``, and its reader reads it. That writer
itself refuses tensors that share memory (tied weights) or have strides, and holds a shard three times in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from embodied_rl.errors import CheckpointError

SUFFIX: Final = ".safetensors"
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As the format names them: https://github.com/huggingface/safetensors#format."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes one file a rank that holds something, one tensor after another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by torch, in every rank.

        Raises:
            TypeError: something is no tensor, or one of a type that the format does not have.
        """
        done: Future[list[WriteResult]] = Future()
        if plan.items:
            number = plan.storage_data["shard_index"]
            with (Path(self.path) / f"shard_{number:05d}{SUFFIX}").open("wb") as file:
                _write(file, plan.items, planner)
                file.flush()
                os.fsync(file.fileno())
        done.set_result([WriteResult(i.index, i.tensor_storage_size() or 0, storage_data=None) for i in plan.items])
        return done


def _write(file: BinaryIO, items: list[WriteItem], planner: SavePlanner) -> None:
    header: dict[str, object] = {}
    chunks: dict[str, dict[str, list[int]]] = {}
    # The widest first, so that every one of them begins at a multiple of its width.
    ordered = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    end = 0
    for item in ordered:
        name, shape = item.index.fqn, _shape(item)
        if name in header:
            raise TypeError(f"{name}: a rank holds several parts of it; expected one")
        begin, end = end, end + math.prod(shape) * _dtype(item).itemsize
        header[name] = {"dtype": _DTYPES[_dtype(item)], "shape": shape, "data_offsets": [begin, end]}
        chunks[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}  # type: ignore[union-attr]
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(chunks)}  # its place in the whole
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for item in ordered:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _dtype(item: WriteItem) -> torch.dtype:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    dtype = item.tensor_data.properties.dtype
    if dtype not in _DTYPES:
        raise TypeError(f"{item.index.fqn}: {dtype} cannot be saved, but {', '.join(map(str, _DTYPES))}")
    return dtype


def _shape(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.sizes)


def read_index(directory: Path) -> dict[str, TensorStorageMetadata]:
    """What the shards in a folder hold: name -> shape, type and parts.

    Raises:
        CheckpointError: there are none, one of them is damaged, or parts are missing between them.
    """
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise CheckpointError(f"{directory}: not a readable checkpoint: it holds no *{SUFFIX}")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:  # torch's reader does not say which
            raise CheckpointError(f"{file}: cannot be read, or not whole: {error}. Use another checkpoint.") from error
    entries = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    index = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if broken := sorted(_with_gaps(index)):
        raise CheckpointError(
            f"{directory}: not whole: parts of {', '.join(broken[:3])} are in none of its {len(files)} file(s). "
            "Use another checkpoint."
        )
    return index


def _with_gaps(index: dict[str, TensorStorageMetadata]) -> Iterator[str]:
    for name, entry in index.items():
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            yield name
