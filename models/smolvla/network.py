"""SmolVLA's network, with lerobot's names of weights.

The expert has as many layers as the language model. Every second one (``self_attn_every_n_layers``) attends to the
prefix's keys and values of its layer and, causally, to the actions; the others project those keys and values and attend
to nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel, SmolVLMModel
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from embodied_rl.models.flow.prefix_attention import AfterPrefix, PrefixCache
from embodied_rl.models.smolvla.files import Sizes


class SmolVlaNetwork(nn.Module):
    """lerobot's ``VLAFlowMatching``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        text, width = sizes.vlm.text_config, sizes.expert.hidden_size
        self.periods = (sizes.min_period, sizes.max_period)
        self.vlm_with_expert = _VlmWithExpert(sizes)
        self.state_proj = nn.Linear(sizes.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(sizes.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, sizes.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def expert(self, prefix: PrefixCache, seen: Tensor, x: Tensor, t: Tensor, zero: Tensor) -> Tensor:
        """Features [N,H,W] of noisy actions.

        Args:
            seen: [N,L] bool: false where the prefix is padding.
            x: [N,H,D] in the weights' type.
            t: [N] float32.
            zero: [N,1,1], added.
        """
        expert: Any = self.vlm_with_expert.lm_expert
        hidden = self._embed(x, t) + zero
        count, length = hidden.shape[:2]
        order = torch.arange(length, device=x.device)
        causal = (order[:, None] >= order).expand(count, -1, -1)
        to_prefix = seen[:, None].expand(-1, length, -1)
        masks = (torch.cat((to_prefix, causal), 2)[:, None], to_prefix[:, None])
        # Layers that look at the prefix alone count the actions from 0.
        rotary = (
            expert.rotary_emb(hidden, position_ids=seen.sum(1, keepdim=True) + order),
            expert.rotary_emb(hidden, position_ids=order.expand(count, -1)),
        )
        cache = AfterPrefix(prefix)
        for layer in expert.layers:
            cross = isinstance(layer.self_attn, CrossAttention)
            hidden = layer(
                hidden, attention_mask=masks[cross], past_key_values=cache, position_embeddings=rotary[cross]
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
        key, value = (tensor.transpose(1, 2).flatten(2) for tensor in past_key_values.layers[self.layer])
        key, value = self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        query = self._heads(self.q_proj(hidden_states))
        query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _VlmWithExpert(nn.Module):
    """lerobot's ``SmolVLMWithExpertModel``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.vlm = _Vlm(sizes)
        self.lm_expert: Any = LlamaModel(sizes.expert)
        self.lm_expert.embed_tokens = None
        every = sizes.self_attention_every
        for index, layer in enumerate(self.lm_expert.layers):
            if every <= 0 or index % every:
                layer.self_attn = CrossAttention(sizes.expert, index)


class _Vlm(nn.Module):
    """transformers' ``SmolVLMForConditionalGeneration`` without its output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.model = SmolVLMModel(sizes.vlm)


def build_network(sizes: Sizes) -> SmolVlaNetwork:
    """Without weights."""
    with no_init_weights():
        return SmolVlaNetwork(sizes)


def time_embedding(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """[N] -> [N,width], float64: sines and cosines of periods in geometric progression."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=t.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = 2 * math.pi * t.double()[:, None] / period
    return torch.cat((angle.sin(), angle.cos()), 1)
