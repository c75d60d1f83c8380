"""Sizes of SmolVLA's network, from a folder of lerobot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, SmolVLMConfig

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import ARCHITECTURE

VLM_NAME = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    VLM_NAME: {
        "text": {
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "vocab_size": 49280,
        },
        "vision": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        "scale_factor": 4,
    }
}
_EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
}
"""Settings of lerobot's that are done here; all published policies have these."""
_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"
_WORDS = "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the network is built from."""

    vlm: Any
    """transformers' ``SmolVLMConfig``, whose types its type checker does not follow."""
    expert: Any
    """``LlamaConfig``."""
    self_attention_every: int
    """Of the expert's layers each such one attends to itself and the prefix, the others to the prefix alone."""
    image_size: tuple[int, int]
    """(height, width)."""
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float
    max_period: float


def read_sizes(config: Mapping[str, Any], path: str) -> Sizes:
    """From a folder's ``config.json``.

    Raises:
        UserError: it is of something else than SmolVLA, or of a variant that is not done here.
    """
    if config.get("type") != "smolvla":
        raise UserError(f"model.path={path}: its config.json is of type {config.get('type')!r}, expected 'smolvla'")
    for key, expected in _EXPECTED.items():
        if config.get(key, expected[0]) not in expected:
            raise UserError(f"model.path={path}: config.json has {key}={config[key]!r}, expected {expected[0]!r}")
    name = str(config.get("vlm_model_name"))
    parts = config.get(ARCHITECTURE) or _PUBLISHED.get(name)
    if parts is None:
        raise UserError(
            f"model.path={path}: config.json has vlm_model_name={name!r}, expected {' or '.join(_PUBLISHED)}"
        )
    layers, expert_layers = int(config["num_vlm_layers"]), int(config.get("num_expert_layers", -1))
    if expert_layers > 0 and expert_layers != layers:
        raise UserError(
            f"model.path={path}: config.json has num_expert_layers={expert_layers} and num_vlm_layers={layers}, "
            "expected as many of both"
        )
    if not config.get("resize_imgs_with_padding"):
        raise UserError(f"model.path={path}: config.json has no resize_imgs_with_padding, expected a size")
    # lerobot turns positions by its own code, with this base whatever the language model was trained with.
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **parts["text"],
    }
    vlm = SmolVLMConfig(
        text_config={"model_type": "llama", **text},
        vision_config=dict(parts["vision"]),
        scale_factor=parts["scale_factor"],
        image_token_id=0,
        pad_token_id=None,
    )
    width = int(text["hidden_size"] * config["expert_width_multiplier"])
    # The expert reads no words, and needs no table of them.
    sizes = {**text, "hidden_size": width, "intermediate_size": _mlp_width(width), "vocab_size": 1}
    columns, rows = config["resize_imgs_with_padding"]
    return Sizes(
        vlm=vlm,
        expert=LlamaConfig(**sizes),
        self_attention_every=int(config["self_attn_every_n_layers"]),
        image_size=(rows, columns),
        chunk_size=int(config["chunk_size"]),
        max_state_dim=int(config["max_state_dim"]),
        max_action_dim=int(config["max_action_dim"]),
        min_period=float(config["min_period"]),
        max_period=float(config["max_period"]),
    )


def without_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the language model's output layer, which the policy does not use. Where the table of words is missing
    because both were one, the layer is that table."""
    result = dict(weights)
    head = result.pop(_HEAD, None)
    if head is not None:
        result.setdefault(_WORDS, head)
    return result


def with_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """lerobot's class has the output layer and uses it for nothing."""
    return {**weights, _HEAD: weights[_WORDS].clone()}


def _mlp_width(width: int) -> int:
    """lerobot's: 8/3 of the width, rounded up to a multiple of 256."""
    inner = 4 * int(2 * width / 3)
    return 256 * -(-inner // 256)
