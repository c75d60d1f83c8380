"""The published folder: what is in it, reading it, writing it back.

=====================================  =============================================================================
``config.json``                        ``model_type: openvla``, sizes, ``norm_stats``
``model*.safetensors``                 the network, whole or in shards with an index
``dataset_statistics.json``            ``norm_stats`` of a fine-tuned checkpoint; they win over those of the config
``preprocessor_config.json``           means and deviations of the image encoders
``tokenizer.json``                     and other small files that travel along
``{part}--{step}_checkpoint.pt``       OpenVLA-OFT's ``action_head`` and ``proprio_projector``; step may be ``latest``
``value_head.safetensors``             ours, where training had a value head
=====================================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tokenizers import Tokenizer
from torch import Tensor

from embodied_rl.errors import UserError, first_line
from embodied_rl.files import write_json
from embodied_rl.models.weights.folder import (
    INDEX_FILE,
    write_tensors,
)
from embodied_rl.models.weights.look import CONFIG_FILE, read_json

STATISTICS_FILE = "dataset_statistics.json"
PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer.json"
PARTS = ("action_head", "proprio_projector")
SHARD_BYTES = 5 * 2**30
_COMPANIONS = ("*.json", "*.model", "*.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """All of a folder but the weights."""

    config: Mapping[str, Any]
    norm_stats: Mapping[str, Any]
    means: tuple[tuple[float, ...], ...]
    """Means of red, green and blue, for DINOv2 and for SigLIP."""
    stds: tuple[tuple[float, ...], ...]
    tokenizer: Tokenizer
    companions: Mapping[str, bytes]
    """Small files as they are, by name; the processor's and the tokenizer's among them."""


def read_folder(directory: Path) -> Folder:
    """Raises UserError: a file is missing, damaged, or of another kind of model."""
    config = read_config(directory)
    statistics = directory / STATISTICS_FILE
    processor = read_json(directory / PROCESSOR_FILE)
    try:
        means, stds = (tuple(tuple(row) for row in processor[name]) for name in ("means", "stds"))
    except (KeyError, TypeError):
        raise UserError(
            f"model.path: {directory / PROCESSOR_FILE} has no means and stds of two image encoders"
        ) from None
    own = {CONFIG_FILE, INDEX_FILE, STATISTICS_FILE}
    companions = {path.name: path.read_bytes() for pattern in _COMPANIONS for path in sorted(directory.glob(pattern))}
    return Folder(
        config=config,
        norm_stats=read_json(statistics) if statistics.exists() else config.get("norm_stats") or {},
        means=means,
        stds=stds,
        tokenizer=read_tokenizer(directory),
        companions={name: content for name, content in companions.items() if name not in own},
    )


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of an OpenVLA model with both image encoders.

    Raises:
        UserError: missing, damaged, or of another model.
    """
    path = directory / CONFIG_FILE
    config = read_json(path)
    found = config.get("model_type")
    if found != "openvla":
        raise UserError(
            f"model.path: {path} says model_type {found!r}, expected 'openvla'; choose the model that the folder is of"
        )
    expected = {"text_config": dict, "timm_model_ids": list, "image_sizes": list}
    wrong = [name for name, kind in expected.items() if not isinstance(config.get(name), kind)]
    if wrong or len(config["timm_model_ids"]) != 2:
        raise UserError(
            f"model.path: {path} lacks {', '.join(wrong) or 'a second image encoder in timm_model_ids'}; expected the "
            "config of a published OpenVLA checkpoint"
        )
    return {"pad_to_multiple_of": 64, **config}


def read_tokenizer(directory: Path) -> Tokenizer:
    """Raises UserError: missing or damaged."""
    read_json(directory / TOKENIZER_FILE)  # its errors say more
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    except Exception as error:  # the library raises no other
        raise UserError(f"model.path: {directory / TOKENIZER_FILE} is no tokenizer ({error}); copy it again") from error
    # The file keeps what it was last used with.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def find_part(directory: Path, name: str) -> Path | None:
    """The file of one of :data:`PARTS`: of ``latest``, else of the highest step; None: the folder has none."""
    prefix, suffix = f"{name}--", "_checkpoint.pt"
    paths = sorted(directory.glob(f"{prefix}*{suffix}"))
    found = {path.name.removeprefix(prefix).removesuffix(suffix): path for path in paths}
    if "latest" in found:
        return found["latest"]
    steps = [step for step in found if step.isdecimal()]
    return found[max(steps, key=int)] if steps else None


def read_part(directory: Path, name: str) -> dict[str, Tensor]:
    """Raises UserError: missing or damaged."""
    path = find_part(directory, name)
    if path is None:
        raise UserError(f"model.path={directory}: there is no {name}--latest_checkpoint.pt and none of a step")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {key.removeprefix("module."): tensor for key, tensor in state.items()}
    except Exception as error:
        raise UserError(f"model.path: {path} cannot be read ({first_line(error)}); copy it again") from error


def write_folder(
    directory: Path, folder: Folder, network: Mapping[str, Tensor], parts: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write the layout above.

    Args:
        network: its weights by published name.
        parts: those of :data:`PARTS` that the policy has.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in folder.companions.items():
        (directory / name).write_bytes(content)
    write_json(directory / CONFIG_FILE, _with_known_code(folder.config, folder.companions))
    write_json(directory / STATISTICS_FILE, folder.norm_stats)
    write_shards(directory, network)
    for name, state in parts.items():
        # As distributed training names them.
        tensors = {f"module.{key}": tensor.detach().cpu() for key, tensor in state.items()}
        torch.save(tensors, directory / f"{name}--latest_checkpoint.pt")


def write_shards(directory: Path, weights: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """One safetensors file, or several and their index."""
    split = split_torch_state_dict_into_shards(dict(weights), max_shard_size=shard_bytes)
    for name, tensors in split.filename_to_tensors.items():
        write_tensors(directory / name, {tensor: weights[tensor] for tensor in tensors})
    if split.is_sharded:
        write_json(directory / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _with_known_code(config: Mapping[str, Any], companions: Mapping[str, bytes]) -> dict[str, Any]:
    """The config whose ``auto_map`` names files that are there, or another repository's: transformers imports them."""
    classes: Mapping[str, str] = config.get("auto_map", {})
    known = {key: name for key, name in classes.items() if "--" in name or f"{name.split('.')[0]}.py" in companions}
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    return {**plain, "auto_map": known} if known else plain
