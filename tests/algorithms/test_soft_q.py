"""Soft actor-critic by hand."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from embodied_rl.algorithms.soft_q import (
    chunk_outcomes,
    critic_loss,
    policy_loss,
    polyak,
    soft_targets,
    temperature_loss,
)


def outcomes(valid: list[bool], terminated: list[bool], gamma: float = 0.5) -> tuple[float, float]:
    reward, discount = chunk_outcomes(
        torch.tensor([1.0, 2.0, 4.0]), torch.tensor(valid), torch.tensor(terminated), gamma=gamma
    )
    return reward.item(), discount.item()


def test_a_chunk_is_worth_its_valid_steps() -> None:
    none = [False] * 3
    assert outcomes([True] * 3, none) == (3.0, 0.125)
    assert outcomes([True, True, False], none) == (2.0, 0.25), "cut after two steps: what follows is bootstrapped"
    assert outcomes([True, True, False], [False, True, False]) == (2.0, 0.0), "ended after two: nothing follows"
    assert outcomes([True, True, False], [False, False, True]) == (2.0, 0.25), "of a step that was not taken"
    assert outcomes(none, none) == (0.0, 1.0)
    assert outcomes([True] * 3, none, gamma=1.0) == (7.0, 1.0)


def test_targets_by_hand() -> None:
    values = torch.tensor([[10.0, 20.0], [12.0, 18.0], [11.0, 30.0]])
    rewards, discounts = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    logprobs, temperature = torch.tensor([-2.0, 3.0]), torch.tensor(0.1)
    targets = soft_targets(rewards, discounts, values, logprobs, temperature=temperature)
    assert targets.tolist() == pytest.approx([1 + 0.5 * (10 + 0.2), 2.0])
    assert soft_targets(rewards, discounts, values, None, temperature=temperature).tolist() == [6.0, 2.0]


def test_losses_by_hand() -> None:
    q, logprobs = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([0.5, -1.0])
    assert critic_loss(q, torch.tensor([2.0, 3.0])).item() == (1 + 4) / 2 + 0.0
    temperature = torch.tensor(2.0)
    decisions = torch.tensor([[[1.0, 0.0]], [[0.5, -0.5]]])

    def lost(of: Literal["min", "mean"], penalty: float) -> float:
        return policy_loss(q, logprobs, decisions, temperature=temperature, of=of, penalty=penalty).item()

    assert lost("min", 0.0) == ((1 - 1) + (-2 - 3)) / 2
    assert lost("mean", 0.0) == ((1 - 1.5) + (-2 - 4)) / 2
    assert lost("min", 4.0) == lost("min", 0.0) + 4 * (1 + 0 + 0.25 + 0.25) / 4


@pytest.mark.parametrize(("logprob", "rises"), [(2.0, True), (0.5, False)])
def test_the_temperature_rises_while_the_entropy_is_too_low(logprob: float, rises: bool) -> None:
    """The target is an entropy of -1, which is a log-probability of 1."""
    log_temperature = torch.tensor(math.log(0.3), requires_grad=True)
    temperature_loss(log_temperature, torch.full((4,), logprob), target_entropy=-1.0).backward()
    assert log_temperature.grad is not None
    assert log_temperature.grad.item() == pytest.approx(-(logprob - 1.0))
    assert (log_temperature.grad.item() < 0) == rises


def test_polyak_by_hand() -> None:
    targets, sources = [torch.tensor([0.0, 8.0])], [torch.tensor([4.0, 0.0])]
    polyak(targets, sources, tau=0.25)
    assert targets[0].tolist() == [1.0, 6.0]
    polyak(targets, sources, tau=1.0)
    assert targets[0].tolist() == [4.0, 0.0] and sources[0].tolist() == [4.0, 0.0]
