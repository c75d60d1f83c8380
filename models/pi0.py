"""``pi0``: PaliGemma with a Gemma action expert that denoises chunks (π0, arXiv:2410.24164), of transformers.

Folders are in lerobot's or in transformers' layout. The names of weights in the network are those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.flow.lerobot_folder import ACTION, ARCHITECTURE, STATE, features, tiny_features
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.flow.prefix import Prefix, Steps, run_after_prefix, run_prefix, steps_after
from embodied_rl.models.weights.look import read_json

_GEMMA = {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
VARIANTS: Mapping[str, Mapping[str, int]] = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384, **_GEMMA},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096, **_GEMMA},
}
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
"""Cameras of transformers' folders, which name none."""
_SETTINGS = ("chunk_size", "max_state_dim", "max_action_dim", "num_inference_steps", "min_period", "max_period")

TOWERS = (
    (r"^model\.(?=paligemma_with_expert|state_proj|action_|time_mlp)", ""),
    (r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "model.dit."),
    (r"\.vision_tower\.vision_model\.", ".vision_tower."),
    (r"\.language_model\.model\.", ".language_model."),
)
"""lerobot's names of weights -> ours: patterns and replacements, one after the other."""
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


class Pi0Policy(FlowPolicy):
    """π0 from a folder of lerobot or of transformers."""

    name = "pi0"
    example = "lerobot/pi0_libero_finetuned"
    tokenizer_name = "google/paligemma-3b-pt-224"
    tiny_tokens = ("<bos>", "<eos>", "<pad>")
    prompt_step = "pi0_new_line_processor"
    centered_images = True
    own_names: ClassVar[Sequence[tuple[str, str]]] = (
        *TOWERS,
        (r"^time_mlp_", "action_time_mlp_"),
        (r"^(?=state_proj|action_in_proj|action_time_mlp)", "embed_action_time."),
    )
    """lerobot's names of weights -> transformers'."""

    @classmethod
    def read_config(cls, directory: Path, spec: PolicySpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, _ = super().read_config(directory, spec)
        if "vlm_config" not in config:
            return config, {}
        sizes = cls.network_config(config, str(directory))
        cameras = {name: int(sizes.vlm_config.vision_config.image_size) for name in CAMERAS}
        return lerobot_config(sizes, features(cameras, spec.state_dim, spec.action_dim)), _statistics(directory)

    @classmethod
    def network_config(cls, config: Mapping[str, Any], path: str) -> Any:
        if cls.name not in (config.get("type"), config.get("model_type")):
            got = config.get("type", config.get("model_type"))
            raise UserError(f"model.path={path}: its config.json is of type {got!r}, expected {cls.name!r}")
        if "vlm_config" in config:
            result: Any = PI0Config.from_dict(dict(config))
        else:
            sizes = config.get(ARCHITECTURE, {})
            text = {**_variant(config, "paligemma_variant", path), **sizes.get("paligemma", {})}
            expert = {**_variant(config, "action_expert_variant", path), **sizes.get("expert", {})}
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

    @classmethod
    def hf_configs(cls, sizes: Any) -> dict[str, Any]:
        return {"vlm_config": sizes.vlm_config, "dit_config": sizes.dit_config}

    @classmethod
    def tiny_config(cls, vocabulary: int) -> dict[str, Any]:
        gemma = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
        siglip = {"num_hidden_layers": 2, "num_attention_heads": 4}
        config = {
            "type": cls.name,
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "image_resolution": [56, 56],
            "chunk_size": 16,
            ARCHITECTURE: {
                "paligemma": {"hidden_size": 64, "intermediate_size": 128, **gemma},
                "expert": {"hidden_size": 48, "intermediate_size": 96, **gemma},
                "vision": {"hidden_size": 64, "intermediate_size": 128, **siglip},
                "vocab_size": vocabulary,
            },
        }
        return lerobot_config(cls.network_config(config, "tiny"), tiny_features(), cls.name)

    @classmethod
    def build_network(cls, config: Any) -> nn.Module:
        """Without the expert's table of words, which nothing reads."""
        model = PI0ForConditionalGeneration(config)
        expert: Any = model.model.dit
        expert.embed_tokens = None
        return model

    @classmethod
    def own_weights(cls, weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """From transformers' names or lerobot's. The words of the expert, and its unused output layer in lerobot's
        folders, are left out.

        Raises:
            UserError: the language model's output layer differs from its words.
        """
        result: dict[str, Tensor] = {}
        head: Tensor | None = None
        for name, tensor in weights.items():
            new = _renamed(name, cls.own_names)
            if new == _VLM_HEAD:
                head = tensor
            elif new not in (_EXPERT_HEAD, EXPERT_WORDS):
                result[new] = tensor
        if head is not None and not _equal(head, result.setdefault(_WORDS, head)):
            raise UserError(
                f"model.path={path}: paligemma's lm_head and embed_tokens differ, expected one table for both "
                "(tied, as published): which of them the policy reads is not known. Remove the one that was not "
                "trained with it"
            )
        return result

    @classmethod
    def published_weights(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = {_renamed(name, _TO_LEROBOT): tensor for name, tensor in weights.items()}
        words, width = weights[_WORDS], weights["action_out_proj.weight"].shape[1]
        # lerobot's class has this layer, reads it and uses it for nothing.
        result[f"model.{_EXPERT_HEAD}"] = torch.zeros(len(words), width, dtype=words.dtype)
        return result

    @property
    def image_size(self) -> tuple[int, int]:
        side = int(self.model.config.vlm_config.vision_config.image_size)
        return side, side

    def frozen_modules(self) -> list[nn.Module]:
        return [self.model.model.vlm]

    def picture_modules(self) -> list[nn.Module]:
        vlm: Any = self.model.model.vlm
        return [vlm.vision_tower, vlm.multi_modal_projector]

    def embedded(self, pixels: Tensor) -> Tensor:
        return self.model.model.vlm.get_image_features(pixels).pooler_output

    def prefix(self, embedded: Tensor, tokens: Tensor, state: Tensor) -> Prefix:
        vlm: Any = self.model.model.vlm
        words = vlm.language_model.embed_tokens(tokens.clamp(min=0))
        pictures = embedded.to(words.dtype)
        # Cameras were stacked as samples; now they follow each other in the sequence.
        x = torch.cat((*pictures.split(len(tokens)), words), 1)
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        seen[:, x.shape[1] - tokens.shape[1] :] = tokens >= 0
        return run_prefix(vlm.language_model, x, seen, state)

    def steps(self, prefix: Prefix, *, in_place: bool) -> Steps:
        length = 1 + self.horizon
        own = torch.ones(length, length, dtype=torch.bool, device=prefix.seen.device)
        own[0, 1:] = False  # the state does not look at the actions
        return steps_after(self.model.model.dit, prefix, own, in_place=in_place)

    def features(self, prefix: Prefix, steps: Steps, x: Tensor, t: Tensor) -> Tensor:
        expert: Any = self.model.model.dit
        embedded = self.model.embed_action_time(prefix.state.to(self._dtype), x.to(self._dtype), t) + prefix.zero
        return expert.norm(run_after_prefix(expert, embedded, steps))[:, 1:]

    def adapter_root(self) -> nn.Module:
        return self.model.model.dit if self.params.train_expert_only else self.model

    def shard_units(self) -> list[nn.Module]:
        model: Any = self.model.model
        return [*model.vlm.vision_tower.encoder.layers, *model.vlm.language_model.layers, *model.dit.layers]


def lerobot_config(config: Any, features: Mapping[str, Any], kind: str = "pi0") -> dict[str, Any]:
    """``config.json`` as lerobot writes it, from transformers' ``PI0Config``.

    Args:
        features: of :func:`~embodied_rl.models.flow.lerobot_folder.features`.
        kind: lerobot's name of the policy.
    """
    text, vision = config.vlm_config.text_config, config.vlm_config.vision_config
    result: dict[str, Any] = {
        "type": kind,
        **features,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "n_action_steps": config.chunk_size,
        "image_resolution": [vision.image_size, vision.image_size],
        **{name: getattr(config, name) for name in _SETTINGS},
    }
    sizes: dict[str, Any] = {
        "paligemma": _unlike(text, VARIANTS["gemma_2b"]),
        "expert": _unlike(config.dit_config, VARIANTS["gemma_300m"]),
        "vision": _unlike(vision, _SIGLIP),
        "vocab_size": text.vocab_size,
    }
    if any(sizes[part] for part in ("paligemma", "expert", "vision")) or text.vocab_size != _VOCABULARY:
        result[ARCHITECTURE] = sizes
    return result


def _equal(head: Tensor, words: Tensor) -> bool:
    """Tensors without numbers are."""
    return head.is_meta or words.is_meta or torch.equal(head, words)


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _statistics(directory: Path) -> dict[str, Tensor]:
    """Statistics that transformers' processor was saved with, by lerobot's names."""
    path = directory / PROCESSOR_FILE
    saved = read_json(path) if path.exists() else {}
    names = {"state": STATE, "actions": ACTION}
    return {
        f"{new}.{kind}": torch.tensor(saved[f"{old}_{kind}"])
        for old, new in names.items()
        for kind in ("mean", "std")
        if f"{old}_{kind}" in saved
    }


def _variant(config: Mapping[str, Any], key: str, path: str) -> Mapping[str, int]:
    name = str(config.get(key))
    if name not in VARIANTS:
        raise UserError(f"model.path={path}: config.json has {key}={name!r}, expected one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def _unlike(part: Any, published: Mapping[str, int]) -> dict[str, int]:
    """Sizes that are not the published ones."""
    return {name: getattr(part, name) for name, size in published.items() if getattr(part, name) != size}
