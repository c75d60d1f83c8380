from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch.distributions import Categorical, Normal

from embodied_rl.algorithms.losses import ESTIMATORS, KLController, full_kl, kl_estimate
from embodied_rl.schema.types import KLType


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_golden_values(kind: str, expected: float) -> None:
    got = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)
    assert got.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_the_policy_comes_first(kind: str, expected: float) -> None:
    assert kl_estimate(torch.tensor([-1.5]), torch.tensor([-1.0]), kind).item() == pytest.approx(expected)


def test_every_kind_exists() -> None:
    assert set(get_args(KLType)) == {*ESTIMATORS, "full"}


@pytest.mark.parametrize(
    ("d", "expected"), [(100.0, 19.0), (-100.0, math.exp(20.0) - 21.0), (-19.0, math.exp(19) - 20)]
)
def test_k3_is_cut_at_20(d: float, expected: float) -> None:
    got = kl_estimate(torch.tensor([d], dtype=torch.float64), torch.zeros(1), "k3")
    assert got.item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_gradient_equals_finite_differences(kind: str) -> None:
    logprobs = torch.tensor([-1.0, -0.3, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -0.9, -0.1, -3.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, kind), (logprobs,))


P, Q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]), torch.tensor([[0.25, 0.25, 0.5], [0.8, 0.1, 0.1]])


def test_full_divergence_is_the_sum_over_the_vocabulary() -> None:
    by_hand = [0.25 * math.log(2.0), 0.7 * math.log(8.0)]
    shift = torch.tensor([[3.0], [-1.0]])  # logits are log-probabilities up to a constant
    assert full_kl(Categorical, {"probs": P}, {"probs": Q}).tolist() == pytest.approx(by_hand)
    assert full_kl(Categorical, {"logits": P.log() + shift}, {"logits": Q.log()}).tolist() == pytest.approx(by_hand)


def test_full_divergence_of_normals() -> None:
    """log(σ2/σ1) + (σ1² + (μ1 - μ2)²) / (2 σ2²) - 1/2."""
    policy = {"loc": torch.tensor([1.0]), "scale": torch.tensor([2.0])}
    reference = {"loc": torch.tensor([4.0]), "scale": torch.tensor([3.0])}
    assert full_kl(Normal, policy, reference).item() == pytest.approx(math.log(1.5) + 13 / 18 - 0.5)
    assert full_kl(Normal, reference, policy).item() == pytest.approx(math.log(2 / 3) + 18 / 8 - 0.5)


def test_full_divergence_has_the_gradient_of_finite_differences() -> None:
    leaf = lambda *numbers: torch.tensor(numbers, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q = {"logits": Q.double()}
    logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: full_kl(Categorical, {"logits": x}, q), (logits,))
    normal = {"loc": leaf(0.1, 0.9).detach(), "scale": leaf(0.7, 1.2).detach()}
    inputs = (leaf(0.3, -1.0), leaf(0.5, 2.0))
    assert torch.autograd.gradcheck(lambda m, s: full_kl(Normal, {"loc": m, "scale": s}, normal), inputs)


def test_full_divergence_of_policies_that_forbid_the_same_tokens() -> None:
    """Logits of -inf on both sides add nothing, to the gradient neither: d/dz_i = p_i (log p_i/q_i - KL)."""
    forbidden = torch.tensor([[-math.inf], [-math.inf]])
    logits = torch.cat((P.log(), forbidden), 1).requires_grad_()
    kl = full_kl(Categorical, {"logits": logits}, {"logits": torch.cat((Q.log(), forbidden), 1)})
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([0.25 * math.log(2.0), 0.7 * math.log(8.0)])
    expected = P * ((P / Q).log() - kl.detach().unsqueeze(1))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.cat((expected, torch.zeros(2, 1)), 1))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_full_divergence(kind: str) -> None:
    policy, reference = Categorical(probs=P[0]), Categorical(probs=Q[0])
    actions = torch.multinomial(P[0], 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    mean = kl_estimate(policy.log_prob(actions), reference.log_prob(actions), kind).double().mean()
    # Deviations of one draw: .49 (k1), .25 (k3).
    assert mean.item() == pytest.approx(0.25 * math.log(2.0), abs=4 * 0.49 / math.sqrt(100_000))


@pytest.mark.parametrize(
    ("kl", "error"), [(12.0, 0.2), (6.6, 0.1), (6.0, 0.0), (5.4, -0.1), (0.0, -0.2), (7.2, 0.2), (4.8, -0.2)]
)
def test_adaptive_weight_by_hand(kl: float, error: float) -> None:
    controller = KLController(0.1, target_kl=6.0, horizon=10_000)
    controller.update(kl, sequences=256)
    assert controller.beta == pytest.approx(0.1 * (1 + error * 0.0256))


def test_adaptive_weight_accumulates_and_a_fixed_one_stays() -> None:
    adaptive, fixed = KLController(0.1, target_kl=1.0, horizon=10), KLController(0.1)
    for _ in range(2):
        adaptive.update(9.0, sequences=5)
        fixed.update(9.0, sequences=5)
    assert adaptive.beta == pytest.approx(0.1 * 1.1 * 1.1)
    assert fixed.beta == 0.1


def test_half_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target_kl=6\.0, horizon=None: give both"):
        KLController(0.1, target_kl=6.0)
    with pytest.raises(ValueError, match="give both"):
        KLController(0.1, horizon=10)
