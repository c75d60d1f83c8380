"""Weights and sizes of π0 in folders of lerobot and of transformers, and as transformers' class names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PI0Config

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import ACTION, ARCHITECTURE, STATE
from embodied_rl.models.weights.folder import read_json

TOKENIZER_NAME = "google/paligemma-3b-pt-224"
VARIANTS: Mapping[str, Mapping[str, int]] = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
}
_GEMMA = {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_VOCABULARY = 257152
PROCESSOR_FILE = "processor_config.json"
"""transformers' processor."""
CAMERAS = ("image", "image2")
"""Of transformers' folders, which name none."""
_SETTINGS = (
    "chunk_size",
    "max_state_dim",
    "max_action_dim",
    "num_inference_steps",
    "min_period",
    "max_period",
)

_TO_TRANSFORMERS = (
    (r"^model\.(?=paligemma_with_expert|state_proj|action_|time_mlp)", ""),
    (r"^time_mlp_", "action_time_mlp_"),
    (r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "model.dit."),
    (r"\.vision_tower\.vision_model\.", ".vision_tower."),
    (r"\.language_model\.model\.", ".language_model."),
    (r"^(?=state_proj|action_in_proj|action_time_mlp)", "embed_action_time."),
)
_TO_LEROBOT = (
    (r"^embed_action_time\.", ""),
    (r"^model\.vlm\.vision_tower\.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."),
    (r"^model\.vlm\.language_model\.embed_tokens\.", "paligemma_with_expert.paligemma.lm_head."),
    (r"^model\.vlm\.", "paligemma_with_expert.paligemma.model."),
    (r"^model\.dit\.", "paligemma_with_expert.gemma_expert.model."),
    (r"^", "model."),
)
_VLM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
_EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
_WORDS = "model.vlm.language_model.embed_tokens.weight"
EXPERT_WORDS = "model.dit.embed_tokens.weight"


def model_config(config: Mapping[str, Any], path: str) -> Any:
    """transformers' ``PI0Config`` from a folder's ``config.json``.

    Raises:
        UserError: it is of something else than π0.
    """
    if config.get("type") != "pi0" and config.get("model_type") != "pi0":
        got = config.get("type", config.get("model_type"))
        raise UserError(f"model.path={path}: its config.json is of type {got!r}, expected 'pi0'")
    if "vlm_config" in config:
        result: Any = PI0Config.from_dict(dict(config))
    else:
        sizes = config.get(ARCHITECTURE, {})
        text = {**_GEMMA, **_variant(config, "paligemma_variant", path), **sizes.get("paligemma", {})}
        expert = {**_GEMMA, **_variant(config, "action_expert_variant", path), **sizes.get("expert", {})}
        vision = {**_SIGLIP, "image_size": config["image_resolution"][0], **sizes.get("vision", {})}
        vocabulary = sizes.get("vocab_size", _VOCABULARY)
        result = PI0Config(
            vlm_config={
                "model_type": "paligemma",
                "text_config": {"model_type": "gemma", "vocab_size": vocabulary, **text},
                "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
                "projection_dim": text["hidden_size"],
                "image_token_id": vocabulary,
            },
            dit_config={"model_type": "gemma", **expert},
            **{name: config[name] for name in _SETTINGS if name in config},
        )
    # The expert reads no words: a table of the vocabulary's size would be empty weight.
    result.dit_config.vocab_size = 1
    result.dit_config.bos_token_id = result.dit_config.eos_token_id = None
    return result


def lerobot_config(config: Any, *, state_dim: int, action_dim: int, cameras: Mapping[str, int]) -> dict[str, Any]:
    """``config.json`` as lerobot writes it.

    Args:
        cameras: name, without ``observation.images.``, and size of the square pictures.
    """
    text, vision, expert = config.vlm_config.text_config, config.vlm_config.vision_config, config.dit_config
    visual = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, size, size]} for name, size in cameras.items()
    }
    result: dict[str, Any] = {
        "type": "pi0",
        "n_obs_steps": 1,
        "input_features": {**visual, "observation.state": {"type": "STATE", "shape": [state_dim]}},
        "output_features": {"action": {"type": "ACTION", "shape": [action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "n_action_steps": config.chunk_size,
        "image_resolution": [vision.image_size, vision.image_size],
        "tokenizer_max_length": 48,
        **{name: getattr(config, name) for name in _SETTINGS},
    }
    sizes = {
        "paligemma": _sizes(text, {**_GEMMA, **VARIANTS["gemma_2b"]}),
        "expert": _sizes(expert, {**_GEMMA, **VARIANTS["gemma_300m"]}),
        "vision": _sizes(vision, _SIGLIP),
        "vocab_size": text.vocab_size,
    }
    if any(sizes[part] for part in ("paligemma", "expert", "vision")) or text.vocab_size != _VOCABULARY:
        result[ARCHITECTURE] = sizes
    return result


def processor_statistics(directory: Path) -> dict[str, Tensor]:
    """Those that transformers' processor was saved with, by lerobot's names."""
    path = directory / PROCESSOR_FILE
    saved = read_json(path) if path.exists() else {}
    names = {"state": STATE, "actions": ACTION}
    return {
        f"{new}.{kind}": torch.tensor(saved[f"{old}_{kind}"])
        for old, new in names.items()
        for kind in ("mean", "std")
        if f"{old}_{kind}" in saved
    }


def to_transformers(weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """A state dict of transformers' class, from its own names or lerobot's. The words of the expert, and its unused
    output layer in lerobot's folders, are left out.

    Raises:
        UserError: the language model's output layer differs from its words.
    """
    result: dict[str, Tensor] = {}
    head: Tensor | None = None
    for name, tensor in weights.items():
        new = name
        for pattern, replacement in _TO_TRANSFORMERS:
            new = re.sub(pattern, replacement, new)
        if new == _VLM_HEAD:
            head = tensor
        elif new not in (_EXPERT_HEAD, EXPERT_WORDS):
            result[new] = tensor
    if head is not None and not torch.equal(head, result.setdefault(_WORDS, head)):
        raise UserError(
            f"model.path={path}: paligemma's lm_head and embed_tokens differ, expected one table for both (tied, as "
            "published): which of them the policy reads is not known. Remove the one that was not trained with it"
        )
    return result


def to_lerobot(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of lerobot, from those of transformers' class."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = name
        for pattern, replacement in _TO_LEROBOT:
            new = re.sub(pattern, replacement, new, count=1)
        result[new] = tensor
    words, norm = weights[_WORDS], weights["model.dit.norm.weight"]
    # lerobot's class has this layer, reads it and uses it for nothing.
    result[f"model.{_EXPERT_HEAD}"] = torch.zeros(len(words), len(norm), dtype=words.dtype)
    return result


def _variant(config: Mapping[str, Any], key: str, path: str) -> Mapping[str, int]:
    name = str(config.get(key))
    if name not in VARIANTS:
        raise UserError(f"model.path={path}: config.json has {key}={name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def _sizes(part: Any, published: Mapping[str, int]) -> dict[str, int]:
    """What differs from the published sizes."""
    return {name: getattr(part, name) for name, size in published.items() if getattr(part, name) != size}
