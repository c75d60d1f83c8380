"""The cache with room: the same keys and values as transformers' own, whatever is done to it, and few allocations."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Qwen2Config

from embodied_rl.language.engines.hf import PreallocatedLayer, roomy_cache

HEADS, SIZE = 2, 4


def config(**changes: object) -> Qwen2Config:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": HEADS}
    return Qwen2Config(**{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def both() -> tuple[DynamicCache, DynamicCache]:
    return roomy_cache(config()), DynamicCache(config=config())


def append(caches: tuple[DynamicCache, DynamicCache], tokens: int, batch: int, generator: torch.Generator) -> None:
    """The same new tokens in both; what comes back is equal."""
    for layer in range(2):
        new = torch.randn(2, batch, HEADS, tokens, SIZE, generator=generator)
        (keys, values), (own_keys, own_values) = (cache.update(new[0], new[1], layer) for cache in caches)
        assert torch.equal(keys, own_keys) and torch.equal(values, own_values)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_as_transformers_own() -> None:
    caches, generator = both(), torch.Generator().manual_seed(0)
    append(caches, 7, 3, generator)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    for _ in range(40):  # beyond the first room
        append(caches, 1, 6, generator)
    rows = torch.tensor([0, 3, 4])
    for cache in caches:
        cache.batch_select_indices(rows)
    append(caches, 1, 3, generator)
    for cache in caches:
        cache.crop(-5)
    for _ in range(100):
        append(caches, 1, 3, generator)
    for cache in caches:
        cache.reset()
    append(caches, 2, 4, generator)


def test_a_token_does_not_move_the_others() -> None:
    cache, generator = roomy_cache(config()), torch.Generator().manual_seed(0)
    places = set()
    for _ in range(200):
        new = torch.randn(2, 3, HEADS, 1, SIZE, generator=generator)
        places.add(cache.update(new[0], new[1], 0)[0].data_ptr())
    assert len(places) <= 6  # 33, 66, 100, 151, 228 tokens


@pytest.mark.parametrize("window", [None, 8])
def test_only_layers_of_full_attention_are_replaced(window: int | None) -> None:
    given = config(use_sliding_window=window is not None, sliding_window=window, max_window_layers=1)
    kinds = [type(layer) is PreallocatedLayer for layer in roomy_cache(given).layers]
    assert kinds == ([True, True] if window is None else [True, False])
