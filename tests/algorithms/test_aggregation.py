from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms.units import aggregate, units_of, weigh
from embodied_rl.schema.types import LossAggregation
from tests.algorithms.terms import SCALE_FACTOR, TERMS, Batch, in_one_go, over_ranks, random_batch, run

MODES: tuple[LossAggregation, ...] = get_args(LossAggregation)


def aggregated(units: Tensor, mask: Tensor, ids: Tensor, mode: LossAggregation, scale_factor: float = 1.0) -> Tensor:
    weights = weigh(units_of(mask), ids, mode=mode, scale_factor=scale_factor)
    return aggregate(units, mask, weights=weights.per_sample, denominator=weights.count)


# Sequences with losses [1,1,1,1] and [4].
GOLDEN = {"token-mean": 1.6, "seq-mean-token-sum": 4.0, "seq-mean-token-mean": 2.5, "seq-mean-token-sum-norm": 0.5}


@pytest.mark.parametrize("mode", MODES)
def test_golden_values(mode: LossAggregation) -> None:
    units = torch.tensor([[1.0, 1.0, 1.0, 1.0], [4.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    assert aggregated(units, mask, torch.tensor([5, 2]), mode, 8.0).item() == pytest.approx(GOLDEN[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_may_be_several_samples_and_a_masked_one_counts_nowhere(mode: LossAggregation) -> None:
    """The same two sequences, the first of them in the samples 0 and 2; the third has no valid unit."""
    units = torch.tensor([[1.0, 1.0], [4.0, 7.0], [1.0, 1.0], [9.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    assert aggregated(units, mask, torch.tensor([3, 1, 3, 8]), mode, 8.0).item() == pytest.approx(GOLDEN[mode])


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_counts_by_hand(mode: LossAggregation) -> None:
    mask = torch.tensor([[True, True], [True, False], [True, False], [False, False]])
    got = weigh(units_of(mask), torch.tensor([0, 1, 0, 2]), mode=mode, scale_factor=4.0)
    third = 1.0 / 3.0
    expected, count = {
        "token-mean": (1.0, 4.0),
        "seq-mean-token-sum": (1.0, 2.0),
        "seq-mean-token-mean": ([third, 1.0, third], 2.0),
        "seq-mean-token-sum-norm": (0.25, 2.0),
    }[mode]
    if isinstance(got.per_sample, torch.Tensor):
        assert got.per_sample[:3].tolist() == pytest.approx(expected)
        assert got.per_sample.dtype == torch.float64
    else:
        assert got.per_sample == expected
    assert got.count == count


def test_units_without_a_dimension_of_their_own() -> None:
    """At chunk level a sample is one unit."""
    mask = torch.tensor([True, False, True])
    got = aggregated(torch.tensor([1.0, 9.0, 4.0]), mask, torch.tensor([0, 0, 1]), "seq-mean-token-mean")
    assert got.item() == 2.5


def test_nothing_valid_is_a_loss_of_zero_with_a_gradient() -> None:
    units, mask = torch.full((2, 2), float("nan"), requires_grad=True), torch.zeros(2, 2, dtype=torch.bool)
    loss = aggregate(units, mask, weights=torch.ones(2), denominator=0.0)
    loss.backward()
    assert units.grad is not None
    assert loss.item() == 0.0
    assert units.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for weights in (torch.ones(2), 1.0):
        with pytest.raises(ValueError, match="some units are valid"):
            aggregate(units, ~mask, weights=weights, denominator=0.0)


def test_other_shapes_are_refused_not_broadcast() -> None:
    """A [N,1] mask against [N,A] ratios gave the reference system losses 14 times too large."""
    units, mask, weights = torch.zeros(4, 14), torch.ones(4, 14, dtype=torch.bool), torch.ones(4)
    for wrong in (
        {"mask": mask[:, :1], "weights": weights},
        {"mask": mask.float(), "weights": weights},
        {"mask": mask, "weights": weights[:1]},
        {"mask": mask, "weights": torch.ones(4, 14)},
    ):
        with pytest.raises(ValueError, match="expected a bool mask of the units' shape and one weight a sample"):
            aggregate(units, denominator=1.0, **wrong)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_finite_differences(mode: LossAggregation) -> None:
    batch = random_batch(0)
    units = batch["values"].clone().requires_grad_()
    loss = lambda x: aggregated(x.square(), batch["mask"], batch["sequence_ids"], mode, 3.0)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (units,))


def slow(name: str, batch: Batch, mode: LossAggregation) -> float:
    """The definition, sequence by sequence, from samples out of which the masked units were cut."""
    sequences: dict[int, list[float]] = {}
    for sample, sequence in enumerate(batch["sequence_ids"].tolist()):
        keep = batch["mask"][sample]
        if keep.any():
            alone = {key: x[sample : sample + 1, keep] for key, x in batch.items() if key != "sequence_ids"}
            sequences.setdefault(sequence, []).extend(TERMS[name][0](alone)[0].flatten().tolist())
    losses = list(sequences.values())
    if not losses:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if mode == "seq-mean-token-mean":
        return sum(sum(units) / len(units) for units in losses) / len(losses)
    scale = SCALE_FACTOR if mode == "seq-mean-token-sum-norm" else 1.0
    return sum(map(sum, losses)) / scale / len(losses)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TERMS)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 9999), size=st.integers(1, 12), ranks=st.integers(1, 3), parts=st.integers(1, 4),
    shuffle=st.randoms(),
)  # fmt: skip
def test_order_micro_batches_and_ranks_change_nothing(
    name: str, mode: LossAggregation, seed: int, size: int, ranks: int, parts: int, shuffle: random.Random
) -> None:
    batch = random_batch(seed, size)
    loss, gradient, numbers = run(name, batch, mode, in_one_go(batch))
    got_loss, got_gradient, got_numbers = run(name, batch, mode, over_ranks(batch, ranks, parts, shuffle))
    assert loss.item() == pytest.approx(slow(name, batch, mode), rel=1e-9, abs=1e-12)
    assert got_loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-9, atol=1e-12)
    assert got_numbers == pytest.approx(numbers, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TERMS)
@settings(max_examples=6)
@example(seed=0, junk=float("nan"))
@given(seed=st.integers(0, 9999), junk=st.sampled_from([0.0, 1e9, -1e9, float("nan"), float("inf"), float("-inf")]))
def test_masked_units_and_padding_change_nothing(name: str, mode: LossAggregation, seed: int, junk: float) -> None:
    """Whatever stands in masked units, in two more units of every sample and in three more samples."""
    if name.startswith("full"):
        junk = 1e3  # parameters of a distribution that exists
    batch = random_batch(seed)
    padded: Batch = {}
    for key, tensor in batch.items():
        if key == "sequence_ids":
            padded[key] = torch.cat((tensor, torch.tensor([0, 77, 78])))
            continue
        padded[key] = tensor.new_full((11, 5, *tensor.shape[2:]), False if key == "mask" else junk)
        hidden = ~batch["mask"].reshape(8, 3, *[1] * (tensor.ndim - 2))
        padded[key][:8, :3] = tensor if key == "mask" else tensor.masked_fill(hidden, junk)
    loss, gradient, numbers = run(name, batch, mode, in_one_go(batch))
    got_loss, got_gradient, got_numbers = run(name, padded, mode, in_one_go(padded))
    assert got_loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got_gradient[:8, :3], gradient, rtol=1e-9, atol=1e-12)
    assert got_numbers == pytest.approx(numbers, rel=1e-9, abs=1e-12)
    outside = torch.ones_like(padded["mask"])
    outside[:8, :3] = ~batch["mask"]
    assert not got_gradient[outside].any()
