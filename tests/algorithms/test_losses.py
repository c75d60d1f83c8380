from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.filters import behaviour_filter
from embodied_rl.algorithms.losses import (
    aipo_policy_loss,
    decoupled_ppo_policy_loss,
    entropy_loss,
    log_ratios,
    loglinear_proximal_logprobs,
    nll_loss,
    ppo_policy_loss,
    value_loss,
)
from embodied_rl.algorithms.units import aggregate
from tests.algorithms.terms import TERMS, random_batch

ONE = torch.ones(1, dtype=torch.bool)


def ppo(ratio: float, advantage: float, **clips: float) -> tuple[float, dict[str, float]]:
    units, diagnostics = ppo_policy_loss(
        logprobs=torch.tensor([math.log(ratio)]),
        old_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        mask=ONE,
        **{"clip_ratio_low": 0.2, **clips},  # type: ignore[arg-type]
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
        (0.5, -2.0, {"clip_ratio_high": 0.28}, 1.6),
        (1.5, -2.0, {}, 3.0),
        (10.0, -1.0, {}, 10.0),
        (10.0, -1.0, {"clip_ratio_c": 3.0}, 3.0),
        (2.0, -1.0, {"clip_ratio_c": 3.0}, 2.0),
        (10.0, 1.0, {"clip_ratio_c": 3.0}, -1.2),
        (0.001, -2.0, {"clip_ratio_low": 1.0}, 0.002),
        (3.0, 2.0, {"clip_ratio_low": 1.0}, -4.0),
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


def test_clip_fractions_count_only_units_whose_gradient_is_cut() -> None:
    """A ratio too low with A > 0, or too high with A < 0, is not clipped; with A = 0 nothing is."""
    units, diagnostics = ppo_policy_loss(
        logprobs=torch.tensor([0.5, 1.5, 4.0, 0.5, 1.5]).log(),
        old_logprobs=torch.zeros(5),
        advantages=torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0]),
        mask=torch.ones(5, dtype=torch.bool),
        clip_ratio_low=0.2,
        clip_ratio_c=3.0,
    )
    assert units.tolist() == pytest.approx([-0.5, 1.5, -1.2, 0.0, 0.0])
    numbers = diagnostics.result()
    assert [numbers[f"clip_fraction_{side}"] for side in ("low", "high", "dual")] == pytest.approx([0.0, 0.2, 0.0])


def test_sequence_ratio_golden() -> None:
    """The second sample has one valid unit, so its ratio is that unit's; the third has none."""
    log_ratio = torch.tensor([[0.1, -0.05, 0.2], [0.3, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    got = log_ratios(log_ratio + 2.0, torch.full((3, 3), 2.0), mask, "sequence").exp()
    assert got[0].tolist() == pytest.approx([1.086904] * 3, abs=1e-6)
    assert got[1:].tolist() == [pytest.approx([math.exp(0.3), 1.0, 1.0], abs=1e-6), [1.0] * 3]
    units, diagnostics = ppo_policy_loss(
        logprobs=log_ratio, old_logprobs=torch.zeros(3, 3), advantages=torch.full((3, 3), 2.0), mask=mask,
        clip_ratio_low=0.2, importance_sampling_level="sequence",
    )  # fmt: skip
    assert units[0].tolist() == pytest.approx([-2 * 1.086904] * 3, abs=1e-5)
    assert units[1:].tolist() == [pytest.approx([-2.4, 0.0, 0.0]), [0.0] * 3]
    assert diagnostics.result()["ratio"] == pytest.approx((3 * 1.086904 + math.exp(0.3)) / 4, abs=1e-6)
    assert diagnostics.result()["clip_fraction_high"] == 0.25


def test_a_sample_of_several_dimensions_is_one_sequence() -> None:
    log_ratio = torch.tensor([[[0.1, -0.05], [0.2, 7.0]], [[0.4, 0.4], [0.4, 0.0]]])
    mask = torch.tensor([[[True, True], [True, False]], [[True] * 2] * 2])
    got = log_ratios(log_ratio, torch.zeros(2, 2, 2), mask, "sequence").exp()
    assert got[mask].tolist() == pytest.approx([1.086904] * 3 + [math.exp(0.3)] * 4, abs=1e-6)
    chunks = torch.tensor([0.1, 0.2])
    assert torch.equal(log_ratios(chunks, torch.zeros(2), torch.ones(2, dtype=torch.bool), "sequence"), chunks)


@pytest.mark.parametrize(
    ("ratio", "weight", "advantage", "clips", "expected"),
    [
        (1.0, 2.0, 3.0, {}, -6.0),
        (1.5, 2.0, 1.0, {}, -2.4),
        (1.5, 2.0, 1.0, {"clip_ratio_high": 0.28}, -2.56),
        (0.5, 0.5, -2.0, {}, 0.8),
        (10.0, 2.0, -1.0, {"clip_ratio_c": 3.0}, 6.0),
    ],
)
def test_decoupled_ppo_by_hand(
    ratio: float, weight: float, advantage: float, clips: dict[str, float], expected: float
) -> None:
    """``ratio`` is π / π_proximal, ``weight`` is π_proximal / π_behaviour."""
    logprobs = torch.tensor([math.log(ratio * weight)], dtype=torch.float64, requires_grad=True)
    units, diagnostics = decoupled_ppo_policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1),
        proximal_logprobs=torch.tensor([math.log(weight)]),
        advantages=torch.tensor([advantage]),
        mask=ONE,
        **{"clip_ratio_low": 0.2, **clips},  # type: ignore[arg-type]
    )
    assert units.item() == pytest.approx(expected, rel=1e-6)
    numbers = diagnostics.result()
    assert numbers["ratio"] == pytest.approx(ratio, rel=1e-6)
    assert numbers["behaviour_weight"] == numbers["behaviour_weight_max"] == pytest.approx(weight, rel=1e-6)
    units.backward()
    assert logprobs.grad is not None
    clipped = ratio != 1.0
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -weight * ratio * advantage, rel=1e-6)


def test_decoupled_ppo_at_sequence_level_has_one_ratio_and_one_weight() -> None:
    """Mean log weights .2 and log ratios -.1 over the two valid units."""
    old, proximal = torch.zeros(1, 3), torch.tensor([[0.5, -0.1, 9.0]])
    units, _ = decoupled_ppo_policy_loss(
        logprobs=proximal + torch.tensor([[-0.3, 0.1, 9.0]]), old_logprobs=old, proximal_logprobs=proximal,
        advantages=torch.tensor([[1.0, 2.0, 3.0]]), mask=torch.tensor([[True, True, False]]), clip_ratio_low=0.2,
        importance_sampling_level="sequence",
    )  # fmt: skip
    assert units.tolist()[0] == pytest.approx([-math.exp(0.1), -2.0 * math.exp(0.1), 0.0])


def test_decoupled_ppo_about_the_behaviour_policy_is_ppo() -> None:
    batch = {key: x for key, x in random_batch(1).items() if key in ("logprobs", "old_logprobs", "advantages", "mask")}
    arguments: dict[str, Any] = {**batch, "clip_ratio_low": 0.2, "clip_ratio_c": 3.0}
    units, diagnostics = ppo_policy_loss(**arguments)
    got, found = decoupled_ppo_policy_loss(**arguments, proximal_logprobs=batch["old_logprobs"])
    assert torch.equal(got, units)
    assert found.result() == {**diagnostics.result(), "behaviour_weight": 1.0, "behaviour_weight_max": 1.0}


def test_units_above_the_behaviour_cap_leave_sum_and_count() -> None:
    """Weights 1, 2 and 10 with r = 1 and A = -1: units 1, 2 and 10, of which two are left to average."""
    old, proximal = torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 10.0]]).log()
    mask = behaviour_filter(old, proximal, torch.ones(1, 3, dtype=torch.bool), cap=5.0)
    units, diagnostics = decoupled_ppo_policy_loss(
        logprobs=proximal, old_logprobs=old, proximal_logprobs=proximal, advantages=-torch.ones(1, 3), mask=mask,
        clip_ratio_low=0.2,
    )  # fmt: skip
    loss = aggregate(units, mask, weights=torch.ones(1), denominator=float(mask.sum()))
    assert loss.item() == diagnostics.result()["policy_loss"] == pytest.approx(1.5)
    assert diagnostics.result()["behaviour_weight_max"] == pytest.approx(2.0)


@pytest.mark.parametrize(("weight", "expected"), [(0.5, -1.0), (2.0, -4.0), (10.0, -6.0)])
def test_truncated_weights_by_hand(weight: float, expected: float) -> None:
    """r = 1 and A = 2, so that L = -2 min(w, 3); the gradient is cut with it."""
    logprobs = torch.tensor([math.log(weight)], dtype=torch.float64, requires_grad=True)
    units, diagnostics = decoupled_ppo_policy_loss(
        logprobs=logprobs, old_logprobs=torch.zeros(1), proximal_logprobs=logprobs.detach(),
        advantages=torch.tensor([2.0]), mask=ONE, clip_ratio_low=0.2, behav_imp_weight_cap=3.0,
        behav_imp_weight_mode="truncate",
    )  # fmt: skip
    units.backward()
    assert logprobs.grad is not None
    assert [units.item(), logprobs.grad.item()] == pytest.approx([expected, expected])
    found = diagnostics.result()
    assert found["behaviour_capped"] == float(weight > 3.0)
    assert found["behaviour_weight"] == pytest.approx(weight), "as it is, not as it counts"


def test_a_sequence_has_one_truncated_weight() -> None:
    """Log weights .2 and 1.4 are .8 each in the mean, e^.8 = 2.23, which 2 cuts; alone, only e^1.4 is cut."""
    proximal = torch.tensor([[0.2, 1.4]])
    losses = {
        level: decoupled_ppo_policy_loss(
            logprobs=proximal, old_logprobs=torch.zeros(1, 2), proximal_logprobs=proximal,
            advantages=torch.ones(1, 2), mask=torch.ones(1, 2, dtype=torch.bool), clip_ratio_low=0.2,
            importance_sampling_level=level, behav_imp_weight_cap=2.0, behav_imp_weight_mode="truncate",
        )[0].tolist()[0]
        for level in ("token", "sequence")
    }  # fmt: skip
    assert losses["sequence"] == pytest.approx([-2.0, -2.0])
    assert losses["token"] == pytest.approx([-math.exp(0.2), -2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [(0.1, 2.0, -0.2, -0.2), (4.0, 2.0, -8.0, -8.0), (10.0, 2.0, -10.0, 0.0), (10.0, -1.0, 5.0, 0.0)],
)
def test_aipo_by_hand(ratio: float, advantage: float, expected: float, gradient: float) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    units, diagnostics = aipo_policy_loss(
        logprobs=logprobs, old_logprobs=torch.zeros(1), advantages=torch.tensor([advantage]), mask=ONE, aipo_rho=5.0
    )
    units.backward()
    assert logprobs.grad is not None
    assert [units.item(), logprobs.grad.item()] == pytest.approx([expected, gradient])
    assert diagnostics.result() == pytest.approx(
        {
            "ratio": ratio,
            "ratio_max": ratio,
            "clip_fraction_high": float(ratio > 5.0),
            "approx_kl": ratio - 1.0 - math.log(ratio),
            "policy_loss": expected,
        }
    )


def test_loglinear_proximal_golden() -> None:
    """Version 5 and samples of versions 5, 4, 3, 1: alphas 0, 0, .5, .75 of the way from -2 to -1."""
    logprobs, old = torch.full((4, 2), -1.0, requires_grad=True), torch.full((4, 2), -2.0)
    got = loglinear_proximal_logprobs(logprobs, old, torch.tensor([5, 4, 3, 1]), 5)
    assert got.tolist() == [[-2.0] * 2, [-2.0] * 2, [-1.5] * 2, [-1.25] * 2]
    assert not got.requires_grad
    assert loglinear_proximal_logprobs(logprobs[:, 0], old[:, 0], torch.tensor([6, 4, 3, 1]), 5).tolist() == [
        -2.0, -2.0, -1.5, -1.25,
    ]  # fmt: skip


def test_a_mask_of_another_shape_is_refused_not_broadcast() -> None:
    """A [N,1] mask against [N,A] ratios gave the reference system clip fractions of 14."""
    tokens = torch.zeros(4, 14)
    arguments: dict[str, Any] = {"logprobs": tokens, "old_logprobs": tokens, "advantages": tokens}
    message = r"logprobs: got shape \[4, 14\], expected the mask's \[4, 1\]"
    with pytest.raises(ValueError, match=message):
        ppo_policy_loss(**arguments, mask=torch.ones(4, 1, dtype=torch.bool), clip_ratio_low=0.2)
    with pytest.raises(ValueError, match=r"mask: got torch\.float32, expected torch\.bool"):
        ppo_policy_loss(**arguments, mask=torch.ones(4, 14), clip_ratio_low=0.2)


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "aipo", "value", "entropy", "nll"])
def test_every_loss_checks_the_shape_of_every_tensor(name: str) -> None:
    read: set[str] = set()

    class Reads(dict[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            read.add(key)
            return super().__getitem__(key)

    term, leaf = TERMS[name]
    batch = random_batch(0)
    term(Reads(batch))
    assert {leaf, "mask"} <= read
    for key in read:
        with pytest.raises(ValueError, match=r"got shape \[8, [23]\], expected the mask's \[8, [23]\]"):
            term({**batch, key: batch[key][:, :2]})


@pytest.mark.parametrize(
    "clips",
    [
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0.2},
        {"clip_ratio_low": 1.5},
        {"clip_ratio_c": 1.0},
        {"clip_ratio_high": -0.1},
        {"clip_ratio_high": 0.0},
    ],
)
def test_hyperparameters_out_of_range(clips: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ppo(1.0, 1.0, **clips)


def test_unit_losses_are_zero_where_masked() -> None:
    mask, fine = torch.tensor([False, True]), torch.tensor([float("nan"), 1.0])
    policy: dict[str, Any] = {"logprobs": fine, "old_logprobs": fine, "advantages": fine, "mask": mask}
    clips: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_c": 3.0}
    value: dict[str, Any] = {"values": fine, "old_values": fine, "returns": fine + 2, "mask": mask}
    for expected, (units, diagnostics) in (
        (-1.0, ppo_policy_loss(**policy, **clips)),
        (-1.0, decoupled_ppo_policy_loss(**policy, proximal_logprobs=fine, **clips)),
        (-1.0, aipo_policy_loss(**policy, aipo_rho=5.0)),
        (1.5, value_loss(**value, value_clip=0.5, huber_delta=1.0)),
        (-1.0, entropy_loss(entropy=fine, mask=mask)),
        (-1.0, nll_loss(logprobs=fine, mask=mask)),
    ):
        assert units.tolist() == [0.0, expected]
        assert all(math.isfinite(number) for number in diagnostics.result().values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_ratios_stay_finite(level: Any) -> None:
    logprobs = torch.tensor([500.0, -500.0, 500.0], requires_grad=True)
    units, _ = ppo_policy_loss(
        logprobs=logprobs, old_logprobs=torch.zeros(3), advantages=torch.tensor([0.0, -1.0, -1.0]),
        mask=torch.ones(3, dtype=torch.bool), clip_ratio_low=0.2, importance_sampling_level=level,
    )  # fmt: skip
    units.sum().backward()
    assert logprobs.grad is not None
    assert units.tolist() == pytest.approx([0.0, 0.8, math.exp(20.0)])
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
    below: dict[str, Any] = {**arguments, "values": torch.tensor([-2.0, -0.25]), "returns": torch.tensor([-3.0, 1.0])}
    assert value_loss(**below, mask=mask, value_clip=0.5)[0].tolist() == [3.125, 0.78125]


def test_huber_is_quadratic_up_to_delta_and_linear_beyond() -> None:
    """Errors 1.5, 2, 4 and -4 with delta 2."""
    units, _ = value_loss(
        values=torch.zeros(4), old_values=torch.zeros(4), returns=torch.tensor([1.5, 2.0, 4.0, -4.0]),
        mask=torch.ones(4, dtype=torch.bool), huber_delta=2.0,
    )  # fmt: skip
    assert units.tolist() == [1.125, 2.0, 6.0, 6.0]


def test_entropy_and_nll_by_hand() -> None:
    units, mask = torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False])
    got, diagnostics = entropy_loss(entropy=units, mask=mask)
    assert got.tolist() == [-1.0, -3.0, 0.0]
    assert diagnostics.result() == {"entropy": 2.0}
    got, diagnostics = nll_loss(logprobs=-units, mask=mask)
    assert got.tolist() == [1.0, 3.0, 0.0]
    assert diagnostics.result() == {"nll": 2.0}


def off_kinks() -> dict[str, Tensor]:
    """Ratios below, inside and above each clip, unit by unit and in the mean of a sample, for both signs of A."""
    rows = torch.tensor([[-1.5, -0.4, -0.1], [-0.1, 0.05, 0.15], [0.1, 0.4, 0.2], [0.3, 1.5, 0.7]], dtype=torch.float64)
    signs = torch.tensor([1.3, -0.7], dtype=torch.float64).repeat_interleave(4).unsqueeze(1).expand(8, 3)
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[0, 2] = mask[5, 0] = False
    batch = random_batch(3)
    return {**batch, "logprobs": batch["old_logprobs"] + rows.repeat(2, 1), "advantages": signs, "mask": mask}


@pytest.mark.parametrize("name", TERMS)
def test_gradient_equals_finite_differences(name: str) -> None:
    batch = off_kinks()
    if name.startswith("decoupled"):
        batch["logprobs"] = batch["proximal_logprobs"] + batch["logprobs"] - batch["old_logprobs"]
    term, leaf = TERMS[name]
    weights = random_batch(4)["values"]  # so that the sum's gradient tells every unit's own
    loss = lambda x: (term({**batch, leaf: x})[0] * weights).sum()  # noqa: E731
    assert torch.autograd.gradcheck(loss, (batch[leaf].clone().requires_grad_(),), eps=1e-7, atol=1e-6)
