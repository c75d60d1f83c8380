from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.algorithms.advantages import AdvantageInputs, estimate_advantages, group_relative, grpo
from embodied_rl.algorithms.statistics import Groups, rollout_returns


def rollout(level: str) -> AdvantageInputs:
    """T=2, N=4, C=2, one group; env 0 succeeds in its first chunk and is over then."""
    rewards, valid = torch.zeros(2, 4, 2), torch.ones(2, 4, 2, dtype=torch.bool)
    rewards[0, 0, 0] = 1.0
    valid[0, 0, 1] = valid[1, 0, 0] = valid[1, 0, 1] = False
    done = torch.zeros(2, 4, 2, dtype=torch.bool)
    return AdvantageInputs(
        reward_level=level,  # type: ignore[arg-type]
        rewards=rewards,
        terminated=done,
        truncated=done,
        valid=valid,
        group_ids=torch.full((4,), 7),
        scores=rollout_returns(rewards, valid),
    )


def test_golden_value() -> None:
    got = group_relative(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_without_std() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    assert group_relative(scores, groups, norm_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_groups_are_given_by_id_not_by_place() -> None:
    scores = torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 0.0])
    got = group_relative(scores, torch.tensor([9, 2, 9, 2, 9, 9]))
    assert got[[0, 2, 4, 5]].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert got[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("size", [2, 3, 7, 10, 64])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e-3, 1e4 / 7])
def test_equal_scores_give_exactly_zero(score: float, size: int) -> None:
    got = group_relative(torch.full((size,), score), torch.zeros(size, dtype=torch.int64))
    assert torch.equal(got, torch.zeros(size))


def telescoping(last: list[float], coefficient: float = 5.0) -> AdvantageInputs:
    """One group, whose members' levels rise to ``last`` in steps of their own; their changes are the rewards."""
    rng = torch.Generator().manual_seed(0)
    level = torch.rand(len(last), 50, 8, generator=rng).flatten(1).sort(1).values * torch.tensor(last)[:, None]
    level[:, -1] = torch.tensor(last)
    rewards = coefficient * level.diff(dim=1, prepend=torch.zeros(len(last), 1))
    rewards = rewards.unflatten(1, (50, 8)).transpose(0, 1).contiguous()
    valid = torch.ones_like(rewards, dtype=torch.bool)
    return AdvantageInputs(
        reward_level="chunk_level",
        rewards=rewards,
        terminated=~valid,
        truncated=~valid,
        valid=valid,
        group_ids=torch.zeros(len(last), dtype=torch.int64),
        scores=rollout_returns(rewards, valid),
    )


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_scores_that_differ_by_rounding_alone_teach_nothing(name: str) -> None:
    options = {"gamma": 1.0} if name == "reinforce_plus_plus_baseline" else {}
    equal = telescoping([1.0] * 8)
    assert len(equal.scores.unique()) > 1, "else there is nothing to see"
    assert not estimate_advantages(name, equal, options).advantages.any()
    differing = telescoping([1.0] * 7 + [1.0 + 1e-4])
    assert estimate_advantages(name, differing, options).advantages[0, -1] > 1e-4


@pytest.mark.parametrize("scores", [[math.inf, math.inf, 1.0], [-math.inf, 2.0, 2.0], [math.nan, 1.0, 1.0]])
def test_a_score_that_is_no_number_comes_to_light(scores: list[float]) -> None:
    advantages = group_relative(torch.tensor(scores), torch.zeros(3, dtype=torch.int64))
    assert advantages.isnan().any(), "which ends the run, with the sample's name"
    assert not Groups.of(torch.zeros(3, dtype=torch.int64)).equal(torch.tensor(scores)).any()


def test_lonely_member_is_refused() -> None:
    with pytest.raises(ValueError, match=r"groups \[4\] have one member"):
        group_relative(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 3, 4]))


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.integers(-8, 8), min_size=4, max_size=16), shift=st.integers(-64, 64), scale=st.integers(1, 8)
)
def test_translation_and_scale_invariance(scores: list[int], shift: int, scale: int) -> None:
    base = torch.tensor(scores, dtype=torch.float32)
    groups = torch.arange(len(scores)) % 2
    reference = group_relative(base, groups)
    assert torch.allclose(group_relative(base + shift, groups), reference, atol=1e-6)
    assert torch.allclose(group_relative(base * scale, groups), reference, atol=1e-4)
    assert torch.allclose(group_relative(base, groups * 5 - 11), reference, atol=0)


def test_every_valid_unit_of_an_env_gets_its_advantage() -> None:
    got = estimate_advantages("grpo", rollout("chunk_level"), {"norm_std": True})
    assert got.returns is None
    assert got.valid.tolist() == [[True] * 4, [False, True, True, True]]
    assert got.advantages.flatten().tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.0, -0.5, -0.5, -0.5], abs=1e-5)

    steps = grpo(rollout("action_level"))
    assert steps.advantages.shape == (2, 4, 2)
    assert steps.advantages[0, 0].tolist() == pytest.approx([1.5, 0.0], abs=1e-5)
    assert steps.advantages[1, 3].tolist() == pytest.approx([-0.5, -0.5], abs=1e-5)


def test_scores_are_those_given_less_the_penalties_of_the_steps_taken() -> None:
    """Env 0's penalty of 9 stands at a step that it did not take; scores 1.5, 1, 1.5, 1 less .5, 0, .5 + .5, .5."""
    penalties = torch.zeros(2, 4, 2)
    penalties[0, 0, 0], penalties[1, 0, 0] = 0.5, 9.0
    penalties[0, 2], penalties[1, 3, 1] = 0.5, 0.5
    for level in ("chunk_level", "action_level"):
        given = dataclasses.replace(
            rollout(level), scores=torch.tensor([1.5, 1.0, 1.5, 1.0]), penalties=penalties.clone()
        )
        got = grpo(given, norm_std=False)
        per_env = got.advantages[0] if level == "chunk_level" else got.advantages[0, :, 0]
        assert per_env.tolist() == [0.25, 0.25, -0.25, -0.25]
        assert got.advantages[1, 0].flatten().tolist() == [0.0] * (1 if level == "chunk_level" else 2)


def test_score_is_the_sum_of_valid_rewards_over_the_rollout() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [10.0, 20.0]], [[4.0, 8.0], [40.0, 80.0]]])
    valid = torch.tensor([[[True, True], [True, False]], [[True, False], [True, True]]])
    assert rollout_returns(rewards, valid).tolist() == [7.0, 130.0]
