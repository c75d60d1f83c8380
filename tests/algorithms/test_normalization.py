from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms.statistics import (
    Groups,
    explained_variance,
    masked_moments,
    mean_and_variance,
    normalize,
)
from embodied_rl.schema.types import NormLevel

LEVELS: tuple[NormLevel, ...] = get_args(NormLevel)


def test_moments_of_valid_units() -> None:
    units, mask = torch.tensor([1.0, 2.0, float("nan"), 3.0]), torch.tensor([True, True, False, True])
    moments = masked_moments(units, mask)
    assert moments.tolist() == [3.0, 6.0, 14.0]
    assert moments.dtype == torch.float64
    assert [float(x) for x in mean_and_variance(moments)] == [2.0, 1.0]
    assert [float(x) for x in mean_and_variance(masked_moments(units, ~mask & mask))] == [0.0, 0.0]


def normalized(units: list[float], mean_level: NormLevel, std_level: NormLevel, **options: bool | float) -> list[float]:
    """Two groups: units 0, 1 and 3, and units 2 and 4. Two tasks: units 0 and 2, and the others."""
    x = torch.tensor(units, dtype=torch.float64)
    return normalize(
        x, torch.ones_like(x, dtype=torch.bool), mean_level=mean_level, std_level=std_level,
        group_ids=torch.tensor([7, 7, 3, 7, 3]), tasks=Groups.of(torch.tensor([4, 6, 4, 6, 6])),
        **{"eps": 0.0, **options},  # type: ignore[arg-type]
    ).tolist()  # fmt: skip


UNITS = [1.0, 2.0, 10.0, 6.0, 14.0]
"""Groups of mean 3 and 12, deviation sqrt(14/2) and sqrt(8/1); the batch's mean is 6.6, its squares sum to 119.2. The
tasks' units 1 and 10 have mean 5.5 and squares of 40.5; 2, 6 and 14 have mean 22/3 and squares of 224/3."""
GROUP_STD, OTHER_STD, BATCH_STD = math.sqrt(7), math.sqrt(8), math.sqrt(119.2 / 4)
TASK_STD, LAST_STD = math.sqrt(40.5), math.sqrt(112 / 3)


@pytest.mark.parametrize(
    ("mean_level", "std_level", "expected"),
    [
        ("none", "none", UNITS),
        ("batch", "none", [-5.6, -4.6, 3.4, -0.6, 7.4]),
        ("group", "none", [-2.0, -1.0, -2.0, 3.0, 2.0]),
        ("none", "batch", [x / BATCH_STD for x in UNITS]),
        ("none", "group", [1 / GROUP_STD, 2 / GROUP_STD, 10 / OTHER_STD, 6 / GROUP_STD, 14 / OTHER_STD]),
        ("batch", "batch", [x / BATCH_STD for x in (-5.6, -4.6, 3.4, -0.6, 7.4)]),
        ("group", "group", [-2 / GROUP_STD, -1 / GROUP_STD, -2 / OTHER_STD, 3 / GROUP_STD, 2 / OTHER_STD]),
        ("group", "batch", [x / BATCH_STD for x in (-2.0, -1.0, -2.0, 3.0, 2.0)]),
        ("task", "none", [-4.5, -16 / 3, 4.5, -4 / 3, 20 / 3]),
        ("task", "task", [-4.5 / TASK_STD, -16 / 3 / LAST_STD, 4.5 / TASK_STD, -4 / 3 / LAST_STD, 20 / 3 / LAST_STD]),
        ("group", "task", [-2 / TASK_STD, -1 / LAST_STD, -2 / TASK_STD, 3 / LAST_STD, 2 / LAST_STD]),
        ("batch", "group", [-5.6 / GROUP_STD, -4.6 / GROUP_STD, 3.4 / OTHER_STD, -0.6 / GROUP_STD, 7.4 / OTHER_STD]),
    ],
)
def test_levels_by_hand(mean_level: NormLevel, std_level: NormLevel, expected: list[float]) -> None:
    assert normalized(UNITS, mean_level, std_level) == pytest.approx(expected)


def test_options_by_hand() -> None:
    assert normalized(UNITS, "group", "none", leave_one_out=True) == pytest.approx([-3.0, -1.5, -4.0, 4.5, 4.0])
    assert normalized(UNITS, "batch", "none", leave_one_out=True) == pytest.approx([-7.0, -5.75, 4.25, -0.75, 9.25])
    biased = normalized(UNITS, "group", "group", unbiased_std=False)
    assert biased == pytest.approx(
        [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), -1.0, 3 / math.sqrt(14 / 3), 1.0]
    )  # fmt: skip
    # The deviation is about the plain mean, whatever is subtracted.
    both = normalized(UNITS, "group", "group", leave_one_out=True, eps=0.5)
    assert both[2:] == pytest.approx([-4 / (OTHER_STD + 0.5), 4.5 / (GROUP_STD + 0.5), 4 / (OTHER_STD + 0.5)])


def test_equal_units_become_exactly_zero() -> None:
    units, mask = torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool)
    for level in ("batch", "group"):
        got = normalize(units, mask, mean_level=level, std_level=level, group_ids=torch.zeros(7, dtype=torch.int64))
        assert torch.equal(got, torch.zeros(7))


@pytest.mark.parametrize("std_level", LEVELS)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_what_rounding_left_is_no_difference(std_level: NormLevel, leave_one_out: bool) -> None:
    """Of two groups one has returns that are sums in another order."""
    above = float(np.nextafter(np.float32(30.0), np.float32(31.0)))
    units, ids = torch.tensor([above, 30.0, 30.0, above, 1.0, 2.0]), torch.tensor([3, 3, 3, 3, 5, 5])
    got = normalize(
        units, torch.ones(6, dtype=torch.bool), mean_level="group", std_level=std_level, leave_one_out=leave_one_out,
        group_ids=ids, tasks=Groups.of(ids),
    )  # fmt: skip
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] == -got[5] != 0.0


def test_small_deviations_of_large_units_are_not_lost() -> None:
    units = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64) + 1e9
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    for level in ("batch", "group"):
        got = normalize(units, mask, mean_level=level, std_level=level, eps=0.0, group_ids=ids)
        assert got.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("mean_level", LEVELS)
@pytest.mark.parametrize("std_level", LEVELS)
def test_a_lone_unit_is_not_scaled_and_less_its_mean_is_zero(mean_level: NormLevel, std_level: NormLevel) -> None:
    for leave_one_out in (False, True):
        got = normalize(
            torch.tensor([2.0, float("nan")]), torch.tensor([True, False]), mean_level=mean_level, std_level=std_level,
            leave_one_out=leave_one_out, group_ids=torch.tensor([4, 5]), tasks=Groups.of(torch.tensor([1, 2])),
        )  # fmt: skip
        assert got.tolist() == [2.0 if mean_level == "none" else 0.0, 0.0]
        nothing = torch.zeros(2, dtype=torch.bool)
        got = normalize(
            torch.ones(2), nothing, mean_level=mean_level, std_level=std_level, group_ids=torch.tensor([4, 5]),
            tasks=Groups.of(torch.tensor([1, 1])),
        )  # fmt: skip
        assert got.tolist() == [0.0, 0.0]


def slow(
    units: Tensor,
    mask: Tensor,
    peers_by: dict[str, Tensor],
    mean_level: str,
    std_level: str,
    leave_one_out: bool,
    unbiased_std: bool,
) -> Tensor:
    """Unit by unit, as the definition has it.

    Args:
        peers_by: level -> [B], equal where units are each other's peers.
    """
    result = torch.zeros_like(units)
    for place in mask.nonzero().tolist():
        index = tuple(place)

        def peers(level: str, place: list[int] = place) -> list[list[int]]:
            ids = peers_by[level]
            return [p for p in mask.nonzero().tolist() if ids[p[0]] == ids[place[0]]]

        value = units[index].item()
        if mean_level != "none":
            own = peers(mean_level)
            others = [p for p in own if p != place] if leave_one_out else own
            if len(own) == 1:
                value = 0.0
            else:
                value -= sum(units[tuple(p)].item() for p in others) / len(others)
        if std_level != "none" and len(own := peers(std_level)) > 1:
            numbers = [units[tuple(p)].item() for p in own]
            mean = sum(numbers) / len(numbers)
            squares = sum((x - mean) ** 2 for x in numbers)
            value /= math.sqrt(squares / (len(numbers) - unbiased_std)) + 1e-3
        result[index] = value
    return result


class Meeting:
    """A sum over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given = threading.Barrier(ranks, timeout=10.0), []

    def __call__(self, tensor: Tensor) -> Tensor:
        self._given.append(tensor)
        self._barrier.wait()
        total = torch.stack(self._given).sum(0)
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return total


CHOICES = {
    "mean_level": st.sampled_from(LEVELS),
    "std_level": st.sampled_from(LEVELS),
    "leave_one_out": st.booleans(),
    "unbiased_std": st.booleans(),
}


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), size=st.integers(1, 9), shuffle=st.randoms(), choices=st.fixed_dictionaries(CHOICES))
def test_equals_a_slow_loop_in_any_order_and_over_ranks(
    seed: int, size: int, shuffle: random.Random, choices: dict
) -> None:
    generator = torch.Generator().manual_seed(seed)
    units = torch.randn(size, 3, generator=generator, dtype=torch.float64) + 2.0
    mask, ids = torch.rand(size, 3, generator=generator) < 0.7, torch.randint(0, 4, (size,), generator=generator)
    task_ids = torch.randint(0, 3, (size,), generator=generator)
    tasks = Groups.of(task_ids)
    whole = normalize(units, mask, group_ids=ids, tasks=tasks, eps=1e-3, **choices)
    peers_by = {"batch": torch.zeros(size), "group": ids, "task": task_ids}
    torch.testing.assert_close(whole, slow(units, mask, peers_by, **choices), rtol=1e-9, atol=1e-9)

    spoiled = units.masked_fill(~mask, float("nan"))
    assert torch.equal(normalize(spoiled, mask, group_ids=ids, tasks=tasks, eps=1e-3, **choices), whole)

    # Two ranks with whole groups, their members in any order; tasks are on both.
    order = list(range(size))
    shuffle.shuffle(order)
    ranks = [torch.tensor([i for i in order if ids[i] % 2 == rank], dtype=torch.int64) for rank in (0, 1)]
    ranks = [own for own in ranks if len(own)]
    reduce = Meeting(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        parts = pool.map(
            lambda own: normalize(
                units[own], mask[own], group_ids=ids[own], tasks=replace(tasks, member_of=tasks.member_of[own]),
                eps=1e-3, reduce=reduce, **choices,
            ),
            ranks,
        )  # fmt: skip
        for own, part in zip(ranks, parts, strict=True):
            torch.testing.assert_close(part, whole[own], rtol=1e-9, atol=1e-9)


SUMS = """
import torch
from embodied_rl.algorithms.statistics import Groups, normalize

sums, units = [], torch.ones(3)
normalize(
    units, units > 0, mean_level="task", std_level="batch", tasks=Groups.of(torch.arange(3)),
    reduce=lambda part: sums.append(part.numel()) or part,
)
print(sums)
"""
"""Prints how large the sums over ranks are: two of the batch, three of all tasks."""


def test_all_ranks_sum_the_same_in_the_same_order() -> None:
    """Each is a process with a hash seed of its own, on which the order of a set of strings depends."""
    ranks = [
        subprocess.check_output([sys.executable, "-c", SUMS], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "5")
    ]
    assert ranks == ["[2, 1, 3, 3, 3]\n"] * 2


def test_what_does_not_fit_is_refused() -> None:
    units = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask: got \[2, 1\] torch.bool, expected bool \[2, 3\]"):
        normalize(units, torch.ones(2, 1, dtype=torch.bool), mean_level="batch", std_level="batch")
    with pytest.raises(ValueError, match="needs the units' group ids"):
        normalize(units, torch.ones(2, 3, dtype=torch.bool), mean_level="batch", std_level="group")
    with pytest.raises(ValueError, match="needs the units' tasks"):
        normalize(units, torch.ones(2, 3, dtype=torch.bool), mean_level="task", std_level="batch")


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5.0, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 2.0), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))
    values = torch.tensor([1.0, 2.5, 3.0, 0.0])
    other = torch.stack((masked_moments(returns[1:] - values[1:], mask[1:]), masked_moments(returns[1:], mask[1:])))
    got = explained_variance(values[:1], returns[:1], mask[:1], reduce=lambda own: own + other)
    assert got == pytest.approx(explained_variance(values, returns, mask))
