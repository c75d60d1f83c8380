"""A transformer that attends to the keys and values of another, both of transformers' layers.

The layers' ``past_key_values`` are two small objects here instead of transformers' caches. Nothing is appended to them,
so that a prefix serves any number of denoising steps, and a layer that is computed again in the backward pass finds
what it found before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PrefixCache:
    """Keeps the keys and values of the prefix's layers, [N,heads,L,head_dim] each, as they compute them."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer] = (key, value)
        return key, value


class AfterPrefix:
    """Puts the prefix's keys and values before those of a layer of the same index."""

    def __init__(self, prefix: PrefixCache) -> None:
        self.layers = prefix.layers

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        prefix_key, prefix_value = self.layers[layer]
        return torch.cat((prefix_key, key), 2), torch.cat((prefix_value, value), 2)


def run_prefix(decoder: Any, x: Tensor, mask: Tensor, positions: Tensor) -> tuple[PrefixCache, Tensor]:
    """Gemma's or Llama's layers over ``x`` [N,L,W].

    Args:
        mask: bool [N,1,1 or L,L], true where a token may be looked at.
        positions: [N,L].

    Returns:
        Keys and values, and a zero [N,1,1] that depends on the last layer's output. To be added to what uses the keys
        and values where the prefix is trained: of that layer only they are used, and FSDP prepares a layer for its
        backward pass when a gradient of its output comes.
    """
    cache = PrefixCache()
    rotary = decoder.rotary_emb(x, position_ids=positions)
    for layer in decoder.layers:
        x = layer(x, attention_mask=mask, position_ids=positions, past_key_values=cache, position_embeddings=rotary)
    return cache, decoder.norm(x)[:, :1, :1] * 0.0


def places(seen: Tensor) -> Tensor:
    """[N,L]: positions that count only what is ``seen`` [N,L]."""
    return (seen.long().cumsum(1) - 1).clamp(min=0)
