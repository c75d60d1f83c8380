from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms.losses import entropy_loss, ppo_policy_loss, token_mean, value_loss

ONE = torch.ones(1, dtype=torch.bool)


def ppo(ratio: float, advantage: float, **clips: float) -> tuple[float, dict[str, float]]:
    units, diagnostics = ppo_policy_loss(
        logprobs=torch.tensor([math.log(ratio)]),
        old_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        mask=ONE,
        **{"clip_ratio_low": 0.2, **clips},
    )
    return units.item(), diagnostics.result()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clips", "expected"),
    [
        (1.0, 2.0, {}, -2.0),
        (1.1, 2.0, {}, -2.2),
        (1.5, 2.0, {}, -2.4),
        (1.5, 2.0, {"clip_ratio_high": 0.28}, -2.56),
        (0.5, 2.0, {}, -1.0),
        (0.5, -2.0, {}, 1.6),
        (1.5, -2.0, {}, 3.0),
        (10.0, -1.0, {}, 10.0),
        (10.0, -1.0, {"clip_ratio_c": 3.0}, 3.0),
        (2.0, -1.0, {"clip_ratio_c": 3.0}, 2.0),
        (10.0, 1.0, {"clip_ratio_c": 3.0}, -1.2),
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, clips: dict[str, float], expected: float) -> None:
    assert ppo(ratio, advantage, **clips)[0] == pytest.approx(expected, rel=1e-6)


def test_ppo_diagnostics_by_hand() -> None:
    """Ratios 1, 1.5, .5, 4 with advantages 1, 1, -1, -1; a fifth unit is masked."""
    ratio = torch.tensor([1.0, 1.5, 0.5, 4.0, 1e3])
    units, diagnostics = ppo_policy_loss(
        logprobs=ratio.log(),
        old_logprobs=torch.zeros(5),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0]),
        mask=torch.tensor([True] * 4 + [False]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    assert units.tolist() == pytest.approx([-1.0, -1.28, 0.8, 3.0, 0.0])
    numbers = diagnostics.result()
    assert numbers.pop("approx_kl") == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5) + 3 - math.log(4)) / 4)
    assert numbers == pytest.approx(
        {
            "ratio": 1.75,
            "ratio_max": 4.0,
            "clip_fraction_low": 0.25,
            "clip_fraction_high": 0.25,
            "clip_fraction_dual": 0.25,
            "policy_loss": 0.38,
        },
        rel=1e-6,
    )


def test_a_mask_of_another_shape_is_refused_not_broadcast() -> None:
    """A [N,1] mask against [N,A] ratios gave the reference system clip fractions of 14."""
    tokens = torch.zeros(4, 14)
    with pytest.raises(ValueError, match=r"logprobs: got shape \[4, 14\], expected the mask's \[4, 1\]"):
        ppo_policy_loss(
            logprobs=tokens, old_logprobs=tokens, advantages=tokens, mask=torch.ones(4, 1, dtype=torch.bool),
            clip_ratio_low=0.2,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        token_mean(tokens, torch.ones(4, 14), denominator=1)


@pytest.mark.parametrize(
    "clips", [{"clip_ratio_low": 0.0}, {"clip_ratio_low": 1.5}, {"clip_ratio_c": 1.0}, {"clip_ratio_high": -0.1}]
)
def test_hyperparameters_out_of_range(clips: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ppo(1.0, 1.0, **clips)


def test_unit_losses_are_zero_where_masked() -> None:
    nan, mask = torch.full((2,), float("nan")), torch.tensor([False, True])
    fine = torch.tensor([float("nan"), 1.0])
    policy, _ = ppo_policy_loss(
        logprobs=fine, old_logprobs=fine, advantages=fine, mask=mask, clip_ratio_low=0.2, clip_ratio_c=3.0
    )
    value, _ = value_loss(values=fine, old_values=fine, returns=fine + 2, mask=mask, value_clip=0.5, huber_delta=1.0)
    entropy, _ = entropy_loss(entropy=fine, mask=mask)
    assert [policy.tolist(), value.tolist(), entropy.tolist()] == [[0.0, -1.0], [0.0, 1.5], [0.0, -1.0]]
    assert token_mean(nan, ~mask & mask, denominator=1.0).item() == 0.0


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([500.0, -500.0, 500.0], requires_grad=True)
    units, _ = ppo_policy_loss(
        logprobs=logprobs, old_logprobs=torch.zeros(3), advantages=torch.tensor([0.0, -1.0, -1.0]),
        mask=torch.ones(3, dtype=torch.bool), clip_ratio_low=0.2,
    )  # fmt: skip
    units.sum().backward()
    assert logprobs.grad is not None
    assert units.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_value_loss_by_hand() -> None:
    """V_old 0, V 2, R 1, clip .5: errors -1 and 1 - .5. With R 3: errors 1 and 2.5, the clipped one is larger."""
    arguments: dict[str, Any] = {
        "values": torch.tensor([2.0, 2.0]),
        "old_values": torch.zeros(2),
        "returns": torch.tensor([1.0, 3.0]),
    }
    mask = torch.ones(2, dtype=torch.bool)
    assert value_loss(**arguments, mask=mask)[0].tolist() == [0.5, 0.5]
    units, diagnostics = value_loss(**arguments, mask=mask, value_clip=0.5)
    assert units.tolist() == [0.5, 3.125]
    assert diagnostics.result() == {"value_clip_fraction": 0.5, "value_loss": 1.8125}
    assert value_loss(**arguments, mask=mask, value_clip=0.5, huber_delta=1.0)[0].tolist() == [0.5, 2.0]


def test_entropy_by_hand() -> None:
    entropy, mask = torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False])
    units, diagnostics = entropy_loss(entropy=entropy, mask=mask)
    assert units.tolist() == [-1.0, -3.0, 0.0]
    assert diagnostics.result() == {"entropy": 2.0}
    assert token_mean(units, mask, denominator=2).item() == -2.0


def test_token_mean_golden() -> None:
    """Two sequences with losses [1,1,1,1] and [4]."""
    units = torch.tensor([[1.0, 1.0, 1.0, 1.0], [4.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    assert token_mean(units, mask, denominator=float(mask.sum())).item() == pytest.approx(1.6)
    with pytest.raises(ValueError, match="no valid unit"):
        token_mean(units, torch.zeros_like(mask), denominator=0)


def random_batch(seed: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    old_logprobs, old_values = draw(), draw()
    return {
        "logprobs": old_logprobs + 0.4 * draw(),
        "old_logprobs": old_logprobs,
        "advantages": draw(),
        "values": old_values + 0.4 * draw(),
        "old_values": old_values,
        "returns": draw(),
        "entropy": draw().abs(),
        "mask": torch.rand(size, 3, generator=generator) < 0.8,
    }


def total_loss(batch: dict[str, Tensor], denominator: float) -> Tensor:
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    policy, _ = ppo_policy_loss(
        **{name: batch[name] for name in names}, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5
    )
    names = ("values", "old_values", "returns", "mask")
    value, _ = value_loss(**{name: batch[name] for name in names}, value_clip=0.3, huber_delta=0.7)
    entropy, _ = entropy_loss(entropy=batch["entropy"], mask=batch["mask"])
    add_up = partial(token_mean, mask=batch["mask"], denominator=denominator)
    return add_up(policy) + 0.5 * add_up(value) + 0.01 * add_up(entropy)


def gradients(batch: dict[str, Tensor], parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients with respect to logprobs and values, accumulated over the given micro-batches."""
    logprobs, values = (batch[name].clone().requires_grad_() for name in ("logprobs", "values"))
    leaves = {**batch, "logprobs": logprobs, "values": values}
    denominator, loss = float(batch["mask"].sum()), torch.zeros(())
    for index in parts:
        share = total_loss({name: tensor[index] for name, tensor in leaves.items()}, denominator)
        share.backward()
        loss = loss + share.detach()
    assert logprobs.grad is not None
    assert values.grad is not None
    return loss, logprobs.grad, values.grad


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), size=st.integers(4, 24), parts=st.integers(1, 6), shuffle=st.randoms())
def test_micro_batches_and_order_change_nothing(seed: int, size: int, parts: int, shuffle) -> None:
    batch = random_batch(seed, size)
    order = list(range(size))
    shuffle.shuffle(order)
    whole = gradients(batch, [torch.arange(size)])
    split = gradients(batch, [torch.tensor(order[i::parts]) for i in range(parts) if order[i::parts]])
    for got, expected in zip(split, whole, strict=True):
        assert torch.allclose(got, expected, atol=1e-6, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), junk=st.sampled_from([0.0, 1e9, -1e9, float("nan"), float("inf")]))
def test_masked_units_have_no_influence(seed: int, junk: float) -> None:
    batch = random_batch(seed, 8)
    spoiled = {
        name: tensor if name == "mask" else tensor.masked_fill(~batch["mask"], junk) for name, tensor in batch.items()
    }
    for got, expected in zip(gradients(spoiled, [torch.arange(8)]), gradients(batch, [torch.arange(8)]), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(3))
def test_autograd_agrees_with_finite_differences(seed: int) -> None:
    batch = random_batch(seed, 5, torch.float64)

    def loss(logprobs: Tensor, values: Tensor, entropy: Tensor) -> Tensor:
        return total_loss({**batch, "logprobs": logprobs, "values": values, "entropy": entropy}, 11.0)

    leaves = tuple(batch[name].clone().requires_grad_() for name in ("logprobs", "values", "entropy"))
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-7, atol=1e-6)


def test_diagnostics_of_micro_batches_equal_those_of_the_whole() -> None:
    batch = random_batch(0, 12)
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    run = lambda index: ppo_policy_loss(clip_ratio_low=0.2, **{n: batch[n][index] for n in names})[1]  # noqa: E731
    whole, merged = run(slice(None)), run(slice(0, 5))
    merged.merge(run(slice(5, 6)))
    merged.merge(run(slice(6, 12)))
    assert merged.result() == pytest.approx(whole.result(), rel=1e-9)
