"""rloo, raw and REINFORCE++, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.algorithms.advantages import (
    AdvantageInputs,
    raw,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)


def rollout(rewards: torch.Tensor, valid: torch.Tensor, level: str = "chunk_level", groups: int = 1) -> AdvantageInputs:
    """[T,N,C] rewards and masks; envs in ``groups`` groups of neighbours."""
    n = rewards.shape[1]
    return AdvantageInputs(
        reward_level=level,  # type: ignore[arg-type]
        rewards=rewards,
        terminated=torch.zeros_like(valid),
        truncated=torch.zeros_like(valid),
        valid=valid,
        group_ids=torch.arange(n) // (n // groups),
    )


def scored(*scores: float) -> AdvantageInputs:
    """One chunk of one step per env, which pays its score."""
    rewards = torch.tensor(scores, dtype=torch.float32).view(1, -1, 1)
    return rollout(rewards, torch.ones_like(rewards, dtype=torch.bool))


def test_rloo_golden_value() -> None:
    assert rloo(scored(1, 0, 0, 1, 1)).advantages[0].tolist() == pytest.approx([0.5, -0.75, -0.75, 0.5, 0.5])


def test_rloo_refuses_a_lonely_member() -> None:
    with pytest.raises(ValueError, match="have one member each"):
        rloo(scored(1.0))


@settings(max_examples=30)
@given(scores=st.lists(st.integers(-9, 9), min_size=2, max_size=8))
def test_rloo_subtracts_the_mean_of_the_others(scores: list[int]) -> None:
    got = rloo(scored(*map(float, scores))).advantages[0]
    for i, score in enumerate(scores):
        others = scores[:i] + scores[i + 1 :]
        assert got[i].item() == pytest.approx(score - sum(others) / len(others), abs=1e-5)


def test_raw_is_the_return_at_every_valid_unit() -> None:
    rewards = torch.tensor([[[1.0, 2.0]], [[4.0, 8.0]]])  # T=2, N=1, C=2
    valid = torch.tensor([[[True, True]], [[True, False]]])
    assert raw(rollout(rewards, valid)).advantages.tolist() == [[7.0], [7.0]]
    action = raw(rollout(rewards, valid, "action_level")).advantages
    assert action.tolist() == [[[7.0, 7.0]], [[7.0, 0.0]]]


def test_reinforce_plus_plus_discounts_from_the_last_valid_unit() -> None:
    rewards, valid = torch.zeros(4, 2, 1), torch.ones(4, 2, 1, dtype=torch.bool)
    rewards[2, 0, 0], valid[3, 0, 0] = 2.0, False  # env 0 ends after three chunks, env 1 after four
    rewards[3, 1, 0] = 4.0
    got = reinforce_plus_plus(rollout(rewards, valid), gamma=0.5).advantages
    assert got[:, 0].tolist() == [0.5, 1.0, 2.0, 0.0]
    assert got[:, 1].tolist() == [0.5, 1.0, 2.0, 4.0]


def test_reinforce_plus_plus_at_action_level_counts_steps_across_chunks() -> None:
    rewards = torch.zeros(2, 1, 2)
    valid = torch.tensor([[[True, True]], [[True, False]]])
    rewards[1, 0, 0] = 8.0
    got = reinforce_plus_plus(rollout(rewards, valid, "action_level"), gamma=0.5).advantages
    assert got.tolist() == [[[2.0, 4.0]], [[8.0, 0.0]]]


def test_the_baseline_is_the_groups_mean() -> None:
    rewards, valid = torch.zeros(2, 4, 1), torch.ones(2, 4, 1, dtype=torch.bool)
    rewards[1, :, 0] = torch.tensor([1.0, 0.0, 6.0, 2.0])
    got = reinforce_plus_plus_baseline(rollout(rewards, valid, groups=2), gamma=0.5).advantages
    assert got[1].tolist() == [0.5, -0.5, 2.0, -2.0]
    assert got[0].tolist() == [0.25, -0.25, 1.0, -1.0]
