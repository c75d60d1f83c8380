"""The prefix of a chunk: pictures, words and their keys and values, to which another transformer attends.

The layers are transformers', and their ``past_key_values`` small objects instead of transformers' caches. Nothing
is appended to them, so that a prefix serves any number of denoising steps, and a layer that is computed again in the
backward pass finds what it found before. What all steps have alike is computed once, in :class:`Steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied_rl.models.attention import attention_mask


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

    def projected(
        self, layer: int, project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """``project`` of the prefix's keys and values, for a layer that looks at nothing else."""
        return project(*self.layers[layer])


class InPlace(AfterPrefix):
    """The same in buffers that hold the prefix already, and take each step's keys and values at their end: for acting,
    where no gradient needs those of earlier steps.

    Args:
        behind: tokens after the prefix.
        projected: layer that looks at the prefix alone -> what it takes of that.
    """

    def __init__(
        self, prefix: PrefixCache, behind: int, projected: Mapping[int, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        super().__init__(prefix)
        self._behind, self._projected = behind, dict(projected or {})
        joined = [layer for layer in self.layers if layer not in self._projected]
        self.buffers = {layer: tuple(self._with_room(tensor) for tensor in self.layers[layer]) for layer in joined}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers[layer]
        keys[:, :, -self._behind :] = key
        values[:, :, -self._behind :] = value
        return keys, values

    def projected(
        self, layer: int, project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        del project
        return self._projected[layer]

    def _with_room(self, tensor: Tensor) -> Tensor:
        count, heads, length, size = tensor.shape
        buffer = tensor.new_empty(count, heads, length + self._behind, size)
        buffer[:, :, :length] = tensor
        return buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a chunk's denoising steps have in common."""

    cache: AfterPrefix
    masks: tuple[Tensor, ...]
    """One for each kind of layer, as :func:`~embodied_rl.models.attention.attention_mask` makes it."""
    rotary: tuple[Any, ...]
    """Cosines and sines of the positions, for each kind of layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The part of the network's input that is computed once for a chunk."""

    cache: PrefixCache
    zero: Tensor
    """[N,1,1], to be added to what uses the cache: see :func:`run_prefix`."""
    seen: Tensor
    """[N,L] bool: false where the prompt is padding."""
    state: Tensor
    """[N,max_state_dim], normalised and filled with zeros."""
    steps: Steps | None = None
    """None: not yet known."""


def run_prefix(decoder: Any, x: Tensor, seen: Tensor, state: Tensor, mask: Tensor | None = None) -> Prefix:
    """Gemma's or Llama's layers over ``x`` [N,L,W].

    ``Prefix.zero`` depends on the last layer's output. Of that layer only keys and values are used, and where the
    prefix is trained FSDP prepares a layer for its backward pass when a gradient of its output comes.

    Args:
        seen, state: as in :class:`Prefix`. Positions count only what is seen.
        mask: bool [N,1,L,L], true where a token may be looked at; None: at all that is seen.
    """
    cache = PrefixCache()
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)
    mask = attention_mask(decoder, seen[:, None, None] if mask is None else mask, x.dtype)
    rotary = decoder.rotary_emb(x, position_ids=positions)
    for layer in decoder.layers:
        x = layer(x, attention_mask=mask, position_ids=positions, past_key_values=cache, position_embeddings=rotary)
    return Prefix(cache=cache, zero=decoder.norm(x)[:, :1, :1] * 0.0, seen=seen, state=state)


def steps_after(decoder: Any, prefix: Prefix, own: Tensor, *, in_place: bool) -> Steps:
    """For :func:`run_after_prefix`: all tokens look at the prefix, and positions follow its.

    Args:
        own: bool [L,L], true where a token may look at another of the L behind the prefix.
        in_place: without gradients.
    """
    count, length, like = len(prefix.seen), len(own), prefix.zero
    mask = torch.cat((prefix.seen[:, None].expand(-1, length, -1), own.expand(count, -1, -1)), 2)[:, None]
    positions = prefix.seen.sum(1, keepdim=True) + torch.arange(length, device=own.device)
    return Steps(
        cache=InPlace(prefix.cache, length) if in_place else AfterPrefix(prefix.cache),
        masks=(attention_mask(decoder, mask, like.dtype),),
        rotary=(decoder.rotary_emb(like, position_ids=positions),),
    )


def run_after_prefix(decoder: Any, x: Tensor, steps: Steps, **inputs: Any) -> Tensor:
    """Gemma's layers over ``x`` [N,L,W], without the last norm.

    Args:
        inputs: what the layers take beside that.
    """
    for layer in decoder.layers:
        x = layer(
            x,
            attention_mask=steps.masks[0],
            past_key_values=steps.cache,
            position_embeddings=steps.rotary[0],
            **inputs,
        )
    return x


def resize_with_padding(images: Tensor, size: tuple[int, int], *, centered: bool) -> Tensor:
    """uint8 [N,H,W,3] -> float32 [N,3,*size] in [-1, 1]: the whole picture, black (-1) beside it.

    Args:
        centered: half of the black on each side; else all of it at the left and the top.
    """
    x = images.permute(0, 3, 1, 2).float() / 255.0
    height, width = x.shape[-2:]
    if (height, width) != size:
        ratio = max(width / size[1], height / size[0])
        inner = (int(height / ratio), int(width / ratio))
        x = functional.interpolate(x, size=inner, mode="bilinear", align_corners=False)
        rows, columns = size[0] - inner[0], size[1] - inner[1]
        left, top = (columns // 2, rows // 2) if centered else (columns, rows)
        x = functional.pad(x, (left, columns - left, top, rows - top))
    return x * 2.0 - 1.0
