"""Exact test and bootstrap: against hand-computed numbers, scipy, and a simulated truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, trim_mean

from embodied_rl.evaluation.paired import Differences, Pairs, differences, iqm, mcnemar


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (5, 0, 0.0625),  # 2 * 1/32
        (6, 1, 0.125),  # 2 * (1 + 7) / 128
        (9, 1, 22 / 1024),  # 2 * (1 + 10) / 1024
        (3, 3, 1.0),
    ],
)
def test_mcnemar_by_hand(won: int, lost: int, p: float) -> None:
    assert mcnemar(won, lost) == mcnemar(lost, won) == pytest.approx(p)


@given(won=st.integers(0, 400), lost=st.integers(0, 400))
def test_mcnemar_is_the_two_sided_binomial_test(won: int, lost: int) -> None:
    if won + lost:
        assert mcnemar(won, lost) == pytest.approx(binomtest(won, won + lost, 0.5).pvalue, rel=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 15, 30])
def test_iqm_is_the_mean_without_the_outer_quarters(count: int) -> None:
    scores = np.random.default_rng(count).random((3, count))
    assert iqm(scores) == pytest.approx(trim_mean(scores, 0.25, axis=1))


def test_iqm_by_hand() -> None:
    assert iqm(np.array([0.0, 0.2, 0.4, 1.0])) == pytest.approx(0.3)


def pairs(first: list[list[float]], second: list[list[float]]) -> Pairs:
    return Pairs(first=np.array(first, dtype=float), second=np.array(second, dtype=float))


def test_values_weigh_episodes_alike_and_iqm_runs_and_tasks() -> None:
    found = differences(
        [
            pairs([[0, 0, 1, 1]], [[1, 1, 1, 1], [0, 1, 1, 0]]),  # 0.5; 1.0 and 0.5
            pairs([[0, 0]], [[0, 1], [0, 0]]),  # 0; 0.5 and 0
        ]
    )
    assert [task.value for task in found.tasks] == pytest.approx([0.25, 0.25])
    assert found.mean.value == pytest.approx((4 * 0.25 + 2 * 0.25) / 6)
    assert found.sides[1].mean.value == pytest.approx((4 * 0.75 + 2 * 0.25) / 6)
    assert found.sides[1].iqm.value == pytest.approx(0.5)  # of 0, 0.5, 0.5, 1 the middle two
    assert found.sides[0].iqm.value == pytest.approx(0.25)  # of 0, 0.5: nothing is cut
    assert found.iqm.value == pytest.approx(0.25)


def test_one_run_each_has_the_interval_of_the_paired_bootstrap() -> None:
    """Resampled differences of n pairs, d of them +1 and the rest 0, are binomial(n, d/n) / n."""
    from scipy.stats import binom

    outcomes = [[0.0] * 40], [[1.0] * 10 + [0.0] * 30]
    found = differences([pairs(*outcomes)], resamples=40_000)
    assert found.mean.interval == pytest.approx([binom.ppf(q, 40, 0.25) / 40 for q in (0.025, 0.975)], abs=0.026)


def test_pairing_narrows_the_interval() -> None:
    """The same two rates: once the same episodes fail, once others do."""
    rng = np.random.default_rng(0)
    first = (rng.random(200) < 0.5).astype(float)
    alike = first.copy()
    alike[np.flatnonzero(first == 0)[:10]] = 1
    other = rng.permutation(alike)
    widths = [width(differences([Pairs(first=first[None], second=b[None])])) for b in (alike, other)]
    assert widths[0] < 0.5 * widths[1]


def width(found: Differences) -> float:
    assert found.mean.interval is not None
    low, high = found.mean.interval
    return high - low


def some_pairs() -> list[Pairs]:
    rng = np.random.default_rng(3)
    return [
        Pairs(first=(rng.random((2, 20)) < 0.4).astype(float), second=(rng.random((3, 20)) < 0.7).astype(float))
        for _ in range(3)
    ]


def test_the_same_numbers_every_time_and_others_with_another_seed() -> None:
    assert differences(some_pairs()) == differences(some_pairs())
    assert differences(some_pairs()) != differences(some_pairs(), seed=1)


def test_tasks_do_not_disturb_each_other() -> None:
    assert differences(some_pairs()).tasks[:2] == differences(some_pairs()[:2]).tasks


def test_exchanged_recipes_give_the_opposite() -> None:
    one = [Pairs(first=p.first[:1], second=p.second[:1]) for p in some_pairs()]
    there = differences(one).mean
    back = differences([Pairs(first=p.second, second=p.first) for p in one]).mean
    assert there.interval is not None and back.interval is not None
    assert (-there.value, -there.interval[1], -there.interval[0]) == pytest.approx((back.value, *back.interval))


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_pairs_that_are_all_alike_have_no_interval(outcome: float) -> None:
    found = differences([pairs([[0.0] * 9], [[outcome] * 9])])
    assert (found.mean.value, found.mean.interval, found.tasks[0].interval) == (outcome, None, None)


def test_blocks_bound_memory_and_keep_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = differences(some_pairs())
    monkeypatch.setattr("embodied_rl.evaluation.paired._BLOCK", 333)
    assert width(differences(some_pairs())) == pytest.approx(width(whole), abs=0.02)


@settings(deadline=None, max_examples=25)
@given(shift=st.floats(-0.3, 0.3), tasks=st.integers(1, 4), runs=st.integers(1, 3))
def test_an_interval_holds_its_value(shift: float, tasks: int, runs: int) -> None:
    rng = np.random.default_rng(tasks)
    found = differences(
        [
            Pairs(
                first=(rng.random((runs, 30)) < 0.5).astype(float),
                second=(rng.random((runs, 30)) < 0.5 + shift).astype(float),
            )
            for _ in range(tasks)
        ],
        resamples=500,
    )
    for estimate in (found.mean, found.iqm, *found.tasks):
        assert estimate.interval is not None
        assert estimate.interval[0] - 0.02 <= estimate.value <= estimate.interval[1] + 0.02


@pytest.mark.parametrize(("tasks", "episodes", "runs"), [(1, 60, 1), (4, 20, 1), (4, 20, 5)])
def test_intervals_cover_the_truth_as_often_as_they_say(tasks: int, episodes: int, runs: int) -> None:
    """Initial states have difficulties, runs are better or worse: 95 % intervals of the difference between recipes
    hold the true one in 90 to 99.9 % of 400 simulated experiments (standard error of 95 %: 1.1 points)."""
    rng = np.random.default_rng(7)
    true_rates = (0.4, 0.6)
    spread = 0.1 if runs > 1 else 0.0
    covered = 0
    for _ in range(400):
        parts = []
        for _ in range(tasks):
            difficulty = rng.normal(0, 0.15, episodes)
            first, second = (
                (rng.random((runs, episodes)) < rate + difficulty + rng.normal(0, spread, (runs, 1))).astype(float)
                for rate in true_rates
            )
            parts.append(Pairs(first=first, second=second))
        interval = differences(parts, resamples=400).mean.interval
        assert interval is not None
        covered += interval[0] <= true_rates[1] - true_rates[0] <= interval[1]
    assert 0.90 <= covered / 400 <= 0.999


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        differences([])
    with pytest.raises(ValueError, match="at least one episode"):
        differences([Pairs(first=np.zeros((1, 0)), second=np.zeros((1, 0)))])
