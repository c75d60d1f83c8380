from __future__ import annotations

import torch
from torch import Tensor

from embodied_rl.models.normalization import LIMIT, RunningNormalizer


def alone(sums: Tensor) -> Tensor:
    return sums


def test_statistics_are_those_of_everything_seen() -> None:
    """Far from 0 beside their spread, where squares of single precision would say nothing."""
    parts = [1e4 + torch.randn(n, 3, dtype=torch.float64) * torch.tensor([1.0, 0.01, 5.0]) for n in (7, 1, 200, 3)]
    normalizer = RunningNormalizer(3)
    for split in (parts[:1], parts[1:3], [], parts[3:]):
        normalizer.update(split, alone)
    everything = torch.cat(parts)
    assert normalizer.count == len(everything)
    torch.testing.assert_close(normalizer.mean, everything.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(normalizer.variance, everything.var(0, correction=0), rtol=1e-9, atol=0)


def test_hand_computed() -> None:
    normalizer = RunningNormalizer(1)
    assert normalizer(torch.tensor([[3.0], [-40.0]])).tolist() == [[3.0], [-LIMIT]], "nothing is known yet"
    normalizer.update([torch.tensor([[1.0], [3.0]])], alone)  # mean 2, variance 1
    normalizer.update([torch.tensor([[8.0]])], alone)  # mean 4, variance (9 + 1 + 16) / 3
    assert normalizer.mean.item() == 4.0
    assert abs(normalizer.variance.item() - 26 / 3) < 1e-12
    scaled = normalizer(torch.tensor([4.0 + (26 / 3) ** 0.5]))
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled, torch.tensor([1.0]))


def test_ranks_with_samples_of_their_own_agree_with_one_that_has_all() -> None:
    parts = [torch.randn(5, 2), torch.randn(0, 2), torch.randn(9, 2) + 3]
    whole = RunningNormalizer(2)
    whole.update(parts, alone)
    everything = torch.cat(parts).double()
    sums = iter(
        (torch.full((2,), 14.0), everything.sum(0), (everything - everything.mean(0)).square().sum(0)) * len(parts)
    )
    for part in parts:
        rank = RunningNormalizer(2)
        rank.update([part], lambda _: next(sums).double())
        assert rank.count == whole.count == 14
        torch.testing.assert_close(rank.mean, whole.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank.variance, whole.variance, rtol=1e-12, atol=1e-12)


def test_a_number_that_never_changes_becomes_zero_and_nothing_is_not_a_number() -> None:
    normalizer = RunningNormalizer(2)
    normalizer.update([], alone)
    normalizer.update([torch.tensor([[5.0, 1.0], [5.0, 2.0]])], alone)
    assert normalizer(torch.tensor([5.0, 1.5])).tolist() == [0.0, 0.0]
