"""What a checkpoint holds, whole, however many ranks wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def saved_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Name -> tensor, with torch's own reader."""
    reader = HuggingFaceStorageReader(str(checkpoint / "actor"))
    tensors: dict[str, Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def saved_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The policy's alone."""
    tensors = saved_tensors(checkpoint)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
