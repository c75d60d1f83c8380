from __future__ import annotations

import math

import pytest
import torch

from embodied_rl.algorithms.normalization import (
    explained_variance,
    masked_moments,
    mean_and_variance,
    normalize_advantages,
)


def test_moments_of_valid_units() -> None:
    units, mask = torch.tensor([1.0, 2.0, float("nan"), 3.0]), torch.tensor([True, True, False, True])
    moments = masked_moments(units, mask)
    assert moments.tolist() == [3.0, 6.0, 14.0]
    assert moments.dtype == torch.float64
    assert [float(x) for x in mean_and_variance(moments)] == [2.0, 1.0]


def test_normalized_units_have_mean_zero_and_unit_std() -> None:
    units = torch.tensor([[1.0, 2.0], [3.0, 1e9]])
    got = normalize_advantages(units, torch.tensor([[True, True], [True, False]]))
    assert got.flatten().tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-4)


def test_two_ranks_equal_one() -> None:
    generator = torch.Generator().manual_seed(0)
    units, mask = torch.randn(10, 4, generator=generator), torch.rand(10, 4, generator=generator) < 0.7
    whole = normalize_advantages(units, mask)
    total = masked_moments(units, mask)
    parts = [normalize_advantages(units[s], mask[s], reduce=lambda _: total) for s in (slice(3), slice(3, None))]
    assert torch.equal(torch.cat(parts), whole)
    summed = masked_moments(units[:3], mask[:3]) + masked_moments(units[3:], mask[3:])
    assert torch.allclose(summed, total, rtol=1e-14)


def test_constant_or_single_units_become_zero() -> None:
    assert torch.equal(normalize_advantages(torch.full((5,), 0.3), torch.ones(5, dtype=torch.bool)), torch.zeros(5))
    one = torch.tensor([True, False, False])
    assert torch.equal(normalize_advantages(torch.tensor([2.0, 5.0, 7.0]), one), torch.zeros(3))
    assert torch.equal(normalize_advantages(torch.ones(3), torch.zeros(3, dtype=torch.bool)), torch.zeros(3))


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5.0, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 2.0), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))
