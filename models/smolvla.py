"""``smolvla``: SmolVLM with an action expert that denoises chunks (SmolVLA, arXiv:2506.01844), in lerobot's layout.

The network is transformers' SmolVLM with an expert around it, with lerobot's names of weights. The expert has as many
layers as the language model. Every second one (``self_attn_every_n_layers``) attends to the prefix's keys and values of
its layer and, causally, to the actions; the others project those keys and values and attend to nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, SmolVLMConfig, SmolVLMModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from embodied_rl.errors import UserError
from embodied_rl.models.attention import attention_mask
from embodied_rl.models.flow.lerobot_folder import ARCHITECTURE, tiny_features
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.flow.prefix import AfterPrefix, InPlace, Prefix, Steps, run_prefix
from embodied_rl.models.flow.sde import time_embedding

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
_EXPECTED: Mapping[str, Any] = {
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
}
"""Settings of lerobot's that are done here; all published policies have these."""
_HEAD = "vlm_with_expert.vlm.lm_head.weight"
_WORDS = "vlm_with_expert.vlm.model.text_model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the network."""

    vlm: Any
    """transformers' ``SmolVLMConfig``, whose types its type checker does not follow."""
    expert: Any
    """``LlamaConfig``."""
    self_attention_every: int
    """Period of the expert's layers that attend to themselves and the prefix; the others attend to the prefix alone."""
    image_size: tuple[int, int]
    """(height, width)."""
    chunk_size: int
    max_state_dim: int
    max_action_dim: int
    min_period: float
    max_period: float


class SmolVlaPolicy(FlowPolicy):
    """SmolVLA from a folder of lerobot.

    The state is a token of the prefix. With ``train_expert_only`` its projection stays as it is, too: to train it,
    gradients would have to pass through the whole language model.
    """

    name = "smolvla"
    example = "HuggingFaceVLA/smolvla_libero"
    tokenizer_name = VLM_NAME
    tiny_tokens = (None, "<end_of_utterance>", "<|im_end|>")
    prompt_step = "smolvla_new_line_processor"
    centered_images = False

    @classmethod
    def network_config(cls, config: Mapping[str, Any], path: str) -> Sizes:
        parts, layers = _checked_parts(config, path), int(config["num_vlm_layers"])
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

    @classmethod
    def hf_configs(cls, sizes: Sizes) -> dict[str, Any]:
        return {"vlm_config": sizes.vlm, "expert_config": sizes.expert}

    @classmethod
    def tiny_config(cls, vocabulary: int) -> dict[str, Any]:
        return {
            "type": "smolvla",
            **tiny_features(),
            "chunk_size": 16,
            "n_action_steps": 16,
            "max_state_dim": 32,
            "max_action_dim": 32,
            "resize_imgs_with_padding": [64, 64],
            "empty_cameras": 0,
            "adapt_to_pi_aloha": False,
            "use_delta_joint_actions_aloha": False,
            "num_steps": 10,
            "vlm_model_name": VLM_NAME,
            "load_vlm_weights": False,
            "add_image_special_tokens": False,
            "attention_mode": "cross_attn",
            "prefix_length": 0,
            "pad_language_to": "max_length",
            "num_expert_layers": 0,
            "num_vlm_layers": 2,
            "self_attn_every_n_layers": 2,
            "expert_width_multiplier": 0.75,
            "min_period": 0.004,
            "max_period": 4.0,
            ARCHITECTURE: {
                "text": {
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "vocab_size": vocabulary,
                },
                "vision": {
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "image_size": 64,
                    "patch_size": 8,
                },
                "scale_factor": 2,
            },
        }

    @classmethod
    def build_network(cls, config: Sizes) -> nn.Module:
        return SmolVlaNetwork(config)

    @classmethod
    def own_weights(cls, weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """Without the language model's output layer, which the policy does not use. Where the table of words is missing
        because both were one, the layer is that table."""
        own = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        head = own.pop(_HEAD, None)
        if head is not None:
            own.setdefault(_WORDS, head)
        return own

    @classmethod
    def published_weights(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """lerobot's class has the output layer and uses it for nothing."""
        return {f"model.{name}": tensor for name, tensor in {**weights, _HEAD: weights[_WORDS].clone()}.items()}

    @property
    def image_size(self) -> tuple[int, int]:
        return self.model.image_size

    def frozen_modules(self) -> list[nn.Module]:
        return [self.model.vlm_with_expert.vlm, self.model.state_proj]

    def picture_modules(self) -> list[nn.Module]:
        vlm: Any = self.model.vlm_with_expert.vlm.model
        return [vlm.vision_model, vlm.connector]

    def embedded(self, pixels: Tensor) -> Tensor:
        vlm: Any = self.model.vlm_with_expert.vlm.model
        return vlm.connector(vlm.vision_model(pixels).last_hidden_state)

    def prefix(self, embedded: Tensor, tokens: Tensor, state: Tensor) -> Prefix:
        vlm: Any = self.model.vlm_with_expert.vlm.model
        words = vlm.text_model.embed_tokens(tokens.clamp(min=0))
        pictures = embedded.to(words.dtype)
        scale = math.sqrt(words.shape[-1])
        last = self.model.state_proj(state.to(self._dtype))[:, None]
        # Cameras were stacked as samples; now they follow each other in the sequence.
        x = torch.cat((*(scale * pictures).split(len(tokens)), scale * words, last.to(words.dtype)), 1)
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        seen[:, x.shape[1] - 1 - tokens.shape[1] : -1] = tokens >= 0
        # Pictures and words do not look at the state, which looks at all.
        mask = seen[:, None, None].repeat(1, 1, x.shape[1], 1)
        mask[:, :, :-1, -1] = False
        return run_prefix(vlm.text_model, x, seen, state, mask)

    def steps(self, prefix: Prefix, *, in_place: bool) -> Steps:
        return self.model.steps(prefix, self.horizon, in_place=in_place)

    def features(self, prefix: Prefix, steps: Steps, x: Tensor, t: Tensor) -> Tensor:
        return self.model.expert(prefix, steps, x.to(self._dtype), t)

    def adapter_root(self) -> nn.Module:
        return self.model.vlm_with_expert.lm_expert if self.params.train_expert_only else self.model

    def shard_units(self) -> list[nn.Module]:
        parts: Any = self.model.vlm_with_expert
        vlm = parts.vlm.model
        return [*vlm.vision_model.encoder.layers, *vlm.text_model.layers, *parts.lm_expert.layers]


def _looks_at_prefix_alone(layer: Any) -> bool:
    return isinstance(layer.self_attn, CrossAttention)


def _checked_parts(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Sizes of the language model and the image encoder, of a policy whose variant is done here."""
    if config.get("type") != "smolvla":
        raise UserError(f"model.path={path}: its config.json is of type {config.get('type')!r}, expected 'smolvla'")
    for key, expected in _EXPECTED.items():
        if config.get(key, expected) != expected:
            raise UserError(f"model.path={path}: config.json has {key}={config[key]!r}, expected {expected!r}")
    name = str(config.get("vlm_model_name"))
    parts = {**_PUBLISHED.get(name, {}), **(config.get(ARCHITECTURE) or {})}
    if "text" not in parts:
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
    return parts


class SmolVlaNetwork(nn.Module):
    """lerobot's ``VLAFlowMatching``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        text, width = sizes.vlm.text_config, sizes.expert.hidden_size
        self.image_size = sizes.image_size
        self.periods = (sizes.min_period, sizes.max_period)
        self.vlm_with_expert = _VlmWithExpert(sizes)
        self.state_proj = nn.Linear(sizes.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(sizes.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, sizes.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def steps(self, prefix: Prefix, length: int, *, in_place: bool) -> Steps:
        """For :meth:`expert`: first of the layers that look at prefix and actions, then of those that look at one."""
        expert: Any = self.vlm_with_expert.lm_expert
        count, like, order = len(prefix.seen), prefix.zero, torch.arange(length, device=prefix.seen.device)
        causal = (order[:, None] >= order).expand(count, -1, -1)
        to_prefix = prefix.seen[:, None].expand(-1, length, -1)
        cache = AfterPrefix(prefix.cache)
        if in_place:
            alone = {
                index: layer.self_attn for index, layer in enumerate(expert.layers) if _looks_at_prefix_alone(layer)
            }
            known = {index: attention.project(*cache.layers[index]) for index, attention in alone.items()}
            cache = InPlace(prefix.cache, length, known)
        return Steps(
            cache=cache,
            masks=(
                attention_mask(expert, torch.cat((to_prefix, causal), 2)[:, None], like.dtype),
                to_prefix[:, None],  # CrossAttention is not transformers'
            ),
            # Layers that look at the prefix alone count the actions from 0.
            rotary=(
                expert.rotary_emb(like, position_ids=prefix.seen.sum(1, keepdim=True) + order),
                expert.rotary_emb(like, position_ids=order.expand(count, -1)),
            ),
        )

    def expert(self, prefix: Prefix, steps: Steps, x: Tensor, t: Tensor) -> Tensor:
        """Features [N,H,W] of noisy actions ``x`` [N,H,D] in the weights' type at times ``t`` [N] float32."""
        expert: Any = self.vlm_with_expert.lm_expert
        hidden = self._embed(x, t) + prefix.zero
        for layer in expert.layers:
            kind = _looks_at_prefix_alone(layer)
            hidden = layer(
                hidden,
                attention_mask=steps.masks[kind],
                past_key_values=steps.cache,
                position_embeddings=steps.rotary[kind],
            )
        return expert.norm(hidden)

    def _embed(self, x: Tensor, t: Tensor) -> Tensor:
        actions = self.action_in_proj(x)
        times = time_embedding(t, actions.shape[-1], *self.periods).to(actions.dtype)
        joined = torch.cat((actions, times[:, None].expand_as(actions)), 2)
        return self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(joined)))


class CrossAttention(nn.Module):
    """Queries from the actions; keys and values projected from those of the prefix's layer of the same index."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(keys, keys, bias=False)
        self.v_proj = nn.Linear(keys, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        past_key_values: AfterPrefix,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls a layer's attention."""
        key, value = past_key_values.projected(self.layer, self.project)
        query = self._heads(self.q_proj(hidden_states))
        query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    def project(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[N,heads,L,head_dim] each, of the prefix's."""
        key, value = (tensor.transpose(1, 2).flatten(2) for tensor in (key, value))
        return self._heads(self.k_proj(key)), self._heads(self.v_proj(value))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _VlmWithExpert(nn.Module):
    """lerobot's ``SmolVLMWithExpertModel``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.vlm: Any = nn.Module()  # transformers' SmolVLMForConditionalGeneration without its output layer
        self.vlm.model = SmolVLMModel(sizes.vlm)
        self.lm_expert: Any = LlamaModel(sizes.expert)
        self.lm_expert.embed_tokens = None
        every = sizes.self_attention_every
        for index, layer in enumerate(self.lm_expert.layers):
            if every <= 0 or index % every:
                layer.self_attn = CrossAttention(sizes.expert, index)


def _mlp_width(width: int) -> int:
    """lerobot's: 8/3 of the width, rounded up to a multiple of 256."""
    inner = 4 * int(2 * width / 3)
    return 256 * -(-inner // 256)
