"""A key-value cache with room to grow: a new token is written into place, and what is there is not copied for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_ROOM = 32
"""Tokens by which a buffer grows at least; a long one grows by half."""


class RoomyLayer(DynamicLayer):
    """``DynamicLayer``, whose ``keys`` and ``values`` are the filled part of larger buffers.

    transformers' own allocates both anew for each token, which is what takes longest where completions are long.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B,H,T,D] each, and return all of both."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self._show(0)
        filled = self.get_seq_length()
        needed = filled + key_states.shape[-2]
        if needed > self._buffers[0].shape[-2]:
            self._buffers = [_larger(buffer, filled, needed) for buffer in self._buffers]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, filled:needed] = new
        return self._show(needed)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda buffer: buffer[indices])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.get_seq_length() > 0:
            filled = self.get_seq_length()
            self._buffers = [change(buffer) for buffer in self._buffers]
            self._show(filled)

    def _show(self, filled: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, :filled] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def _larger(buffer: Tensor, filled: int, needed: int) -> Tensor:
    """[B,H,more than needed,D] that begins with the filled part."""
    batch, heads, _, size = buffer.shape
    larger = buffer.new_empty(batch, heads, needed + max(_ROOM, needed // 2), size)
    larger[:, :, :filled] = buffer[:, :, :filled]
    return larger


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """``DynamicCache`` for a model; layers of other kinds than full attention stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
