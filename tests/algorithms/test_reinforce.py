"""rloo, raw and REINFORCE++, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_rl.algorithms.advantages import (
    AdvantageEstimate,
    AdvantageInputs,
    estimate_advantages,
    grpo,
    raw,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.algorithms.statistics import normalize, rollout_returns
from embodied_rl.schema.types import NormLevel


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
        scores=rollout_returns(rewards, valid),
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


LEVELS = ("chunk_level", "action_level")


def random_rollout(seed: int, level: str, members: list[int]) -> tuple[AdvantageInputs, Tensor]:
    """T=4, C=3, one group of each size in ``members``, in any order; every env ends somewhere. And penalties, NaN where
    a step was not taken."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(members)
    lengths = torch.randint(1, 13, (n,), generator=generator)
    valid = (torch.arange(12) < lengths[:, None]).view(n, 4, 3).transpose(0, 1)
    rewards = torch.randn(4, n, 3, generator=generator, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    ids = torch.arange(len(members)).repeat_interleave(torch.tensor(members))[order] * 3 - 1
    penalties = torch.rand(4, n, 3, generator=generator, dtype=torch.float64).masked_fill(~valid, float("nan"))
    return dataclasses.replace(rollout(rewards, valid, level), group_ids=ids), penalties


@settings(max_examples=30)
@given(
    seed=st.integers(0, 9999),
    level=st.sampled_from(LEVELS),
    members=st.lists(st.integers(2, 5), min_size=1, max_size=3),
)
def test_raw_of_normalized_scores_is_grpo_and_rloo(seed: int, level: str, members: list[int]) -> None:
    batch, _ = random_rollout(seed, level, members)
    everyone = torch.ones_like(batch.scores, dtype=torch.bool)
    cases: list[tuple[AdvantageEstimate, NormLevel, bool]] = [
        (grpo(batch), "group", False),
        (grpo(batch, norm_std=False), "none", False),
        (rloo(batch), "none", True),
    ]
    for expected, std_level, leave_one_out in cases:
        scores = normalize(
            batch.scores, everyone, mean_level="group", std_level=std_level, leave_one_out=leave_one_out,
            group_ids=batch.group_ids, eps=1e-6,
        )  # fmt: skip
        got = raw(dataclasses.replace(batch, scores=scores))
        torch.testing.assert_close(got.advantages, expected.advantages, rtol=1e-9, atol=1e-9)
        assert torch.equal(got.valid, expected.valid)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", [raw, grpo, rloo])
def test_penalties_come_off_the_score(estimator: Callable[[AdvantageInputs], AdvantageEstimate], level: str) -> None:
    batch, penalties = random_rollout(5, level, [3, 2])
    less = batch.scores - torch.tensor([penalties[:, i][batch.valid[:, i]].sum() for i in range(5)])
    expected = estimator(dataclasses.replace(batch, scores=less))
    got = estimator(dataclasses.replace(batch, penalties=penalties))
    torch.testing.assert_close(got.advantages, expected.advantages)
    assert got.advantages.abs().sum() > 0


def test_penalties_are_discounted_from_where_they_arise() -> None:
    """Three steps and R = 8, gamma .5: 2, 4, 8 less the penalties' own returns-to-go, 1 + .5*2 + .25*4, 2 + .5*4, 4."""
    rewards, valid = torch.zeros(4, 1, 1), torch.tensor([True, True, True, False]).view(4, 1, 1)
    rewards[0] = 8.0
    batch = dataclasses.replace(rollout(rewards, valid), penalties=torch.tensor([1.0, 2.0, 4.0, 50.0]).view(4, 1, 1))
    assert reinforce_plus_plus(batch, gamma=0.5).advantages.flatten().tolist() == [-1.0, 0.0, 4.0, 0.0]


@settings(max_examples=30)
@given(seed=st.integers(0, 9999), level=st.sampled_from(LEVELS), baseline=st.booleans())
def test_reinforce_plus_plus_equals_a_slow_loop(seed: int, level: str, baseline: bool) -> None:
    batch, penalties = random_rollout(seed, level, [2, 3])
    chunks = level == "chunk_level"
    expected = torch.zeros(4, 5, dtype=torch.float64) if chunks else torch.zeros(4, 5, 3, dtype=torch.float64)
    for env in range(5):
        score = batch.scores[env].item()
        if baseline:
            score -= batch.scores[batch.group_ids == batch.group_ids[env]].mean().item()
        places = [(t, c) for t in range(4) for c in range(3) if batch.valid[t, env, c]]
        paid = {place: penalties[place[0], env, place[1]].item() for place in places}
        if chunks:
            paid = {(t, 0): sum(x for (when, _), x in paid.items() if when == t) for t, _ in places}
        to_go = 0.0
        for number, (t, c) in enumerate(reversed(paid)):
            to_go = (score if number == 0 else 0.0) - paid[t, c] + 0.9 * to_go
            expected[(t, env) if chunks else (t, env, c)] = to_go
    batch = dataclasses.replace(batch, penalties=penalties, rewards=torch.full_like(batch.rewards, float("nan")))
    got = (reinforce_plus_plus_baseline if baseline else reinforce_plus_plus)(batch, gamma=0.9)
    # The powers of gamma are float32.
    torch.testing.assert_close(got.advantages, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.valid, batch.valid.any(-1) if chunks else batch.valid)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "gae"])
def test_every_estimator_gives_valid_units_only_and_leaves_its_inputs_alone(name: str) -> None:
    batch, penalties = random_rollout(1, "action_level", [2, 3])
    batch = dataclasses.replace(batch, penalties=penalties)
    before = batch.scores.clone(), penalties.clone()
    entry = ADVANTAGES[name]
    got = estimate_advantages(name, batch, {"gamma": 0.9} if "gamma" in entry.options else {})
    assert torch.equal(got.valid, batch.valid)
    assert not got.advantages[~got.valid].any()
    assert got.advantages[got.valid].all()
    assert torch.equal(batch.scores, before[0]) and torch.equal(penalties.nan_to_num(), before[1].nan_to_num())
