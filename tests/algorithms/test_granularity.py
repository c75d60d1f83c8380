from __future__ import annotations

import pytest
import torch

from embodied_rl.algorithms.units import any_at_level, broadcast_to_level, mask_at_level, reduce_to_level

# Two samples, C=2, A=3; of sample 0 only the first step is valid.
TOKENS = torch.tensor([[[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]])
VALID = torch.tensor([[True, False], [True, True]])


def test_reduce_sums_valid_units_only() -> None:
    assert reduce_to_level(TOKENS, VALID, "token_level").tolist() == [
        [[1, 2, 4], [0, 0, 0]],
        [[1, 1, 1], [2, 2, 2]],
    ]
    assert reduce_to_level(TOKENS, VALID, "action_level").tolist() == [[7, 0], [3, 6]]
    assert reduce_to_level(TOKENS, VALID, "chunk_level").tolist() == [7, 9]


def test_masks_count_units_of_their_level() -> None:
    """RLinf counts a [N,1] mask against [N,A] ratios; here a token mask counts tokens."""
    assert mask_at_level(VALID, "token_level", 3).sum() == 9
    assert mask_at_level(VALID, "action_level", 3).sum() == 3
    assert mask_at_level(VALID, "chunk_level", 3).sum() == 2
    assert mask_at_level(torch.zeros(2, 2, dtype=torch.bool), "chunk_level", 3).tolist() == [False, False]
    for level in ("token_level", "action_level", "chunk_level"):
        assert mask_at_level(VALID, level, 3).shape == reduce_to_level(TOKENS, VALID, level).shape


def test_a_unit_has_a_token_if_any_of_its_tokens_is_true() -> None:
    tokens = torch.tensor([[[True, False, False], [False] * 3], [[False] * 3] * 2])
    assert any_at_level(tokens, "token_level").tolist() == tokens.tolist()
    assert any_at_level(tokens, "action_level").tolist() == [[True, False], [False, False]]
    assert any_at_level(tokens, "chunk_level").tolist() == [True, False]


def test_invalid_units_do_not_matter_even_if_nan() -> None:
    spoiled = TOKENS.clone()
    spoiled[0, 1] = float("nan")
    assert reduce_to_level(spoiled, VALID, "chunk_level").tolist() == [7, 9]


def test_broadcast_copies_to_every_finer_unit() -> None:
    def to(units: torch.Tensor, reward: str, level: str) -> list:
        return broadcast_to_level(units, reward, level, num_action_chunks=2, action_dim=3).tolist()  # type: ignore[arg-type]

    chunk, action = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert to(chunk, "chunk_level", "chunk_level") == [1, 2]
    assert to(chunk, "chunk_level", "action_level") == [[1, 1], [2, 2]]
    assert to(chunk, "chunk_level", "token_level") == [[[1] * 3] * 2, [[2] * 3] * 2]
    assert to(action, "action_level", "action_level") == [[1, 2], [3, 4]]
    assert to(action, "action_level", "token_level") == [[[1] * 3, [2] * 3], [[3] * 3, [4] * 3]]
    with pytest.raises(ValueError, match="check_levels"):
        to(action, "action_level", "chunk_level")
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 2\]"):
        to(torch.zeros(2, 3), "action_level", "token_level")


def test_wrong_mask_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"valid: got \[2, 1\] torch.bool, expected \[2, 2\]"):
        reduce_to_level(TOKENS, torch.ones(2, 1, dtype=torch.bool), "token_level")
    with pytest.raises(ValueError, match=r"expected \[2, 2\] torch\.bool"):
        reduce_to_level(TOKENS, torch.ones(2, 2), "token_level")
