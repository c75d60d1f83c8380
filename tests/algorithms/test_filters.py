from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.algorithms.filters import behaviour_filter, group_filter, m2po_filter, prefix_filter


def test_group_filter_keeps_groups_inside_the_bounds_inclusive() -> None:
    scores = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.float32)
    groups = torch.arange(4).repeat_interleave(4)
    kept = group_filter(scores, groups, rewards_lower_bound=0.25, rewards_upper_bound=0.75)
    assert kept.view(4, 4).tolist() == [[False] * 4, [True] * 4, [False] * 4, [True] * 4]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    shuffled = group_filter(scores[order], groups[order], rewards_lower_bound=0.25, rewards_upper_bound=0.75)
    assert torch.equal(shuffled, kept[order])
    tenth = torch.zeros(10)
    tenth[3] = 1.0
    same_group = torch.zeros(10, dtype=torch.int64)
    assert group_filter(tenth, same_group, rewards_lower_bound=0.1, rewards_upper_bound=0.9).all()
    with pytest.raises(ValueError, match="no group could pass"):
        group_filter(scores, groups, rewards_lower_bound=0.9, rewards_upper_bound=0.1)


def kept_tokens(
    sequences: list[list[int]], scores: list[float], min_tokens: int, groups: list[int] | None = None
) -> list[list[bool]]:
    """What stays of each sequence; they are padded with token 0, which is also a token like any other."""
    longest = max(map(len, sequences)) + 1
    got = prefix_filter(
        torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences]),
        torch.tensor([[place < len(sequence) for place in range(longest)] for sequence in sequences]),
        torch.tensor(scores),
        torch.tensor(groups or [0] * len(sequences)),
        min_tokens=min_tokens,
    )
    return [row[: len(sequence)] for row, sequence in zip(got.tolist(), sequences, strict=True)]


PAIR = [[1, 2, 3, 4], [1, 2, 9, 4]]
ALL = [[True] * 4] * 2


def test_a_shared_prefix_is_masked_where_scores_differ() -> None:
    assert kept_tokens(PAIR, [1.0, 0.0], 2) == [[False, False, True, True]] * 2
    assert kept_tokens(PAIR, [1.0, 0.0], 3) == ALL, "shorter than asked for"
    assert kept_tokens(PAIR, [1.0, 1.0], 2) == ALL, "equal scores"
    assert kept_tokens(PAIR, [1.0, 0.0], 2, [0, 1]) == ALL, "not of one group"


def test_a_prefix_that_is_the_whole_sequence_stays() -> None:
    assert kept_tokens([[1, 2], [1, 2, 3]], [1.0, 0.0], 2) == [[True, True], [False, False, True]]
    assert kept_tokens([[1, 2], [1, 2]], [1.0, 0.0], 1) == [[True, True]] * 2


def test_padding_is_no_shared_token() -> None:
    assert kept_tokens([[1, 2], [1, 2, 0, 0, 5]], [1.0, 0.0], 3) == [[True] * 2, [True] * 5]


def test_the_longest_prefix_shared_with_any_other_score_counts() -> None:
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [1, 7, 7, 7, 7], [1, 2, 3, 4, 6]]
    got = kept_tokens(sequences, [1.0, 0.0, 0.0, 1.0], 1)
    assert [row.count(False) for row in got] == [3, 3, 1, 3]


@settings(max_examples=60)
@given(
    sequences=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6),
    data=st.data(),
    min_tokens=st.integers(1, 4),
)
def test_prefix_filter_equals_a_slow_loop(sequences: list[list[int]], data: st.DataObject, min_tokens: int) -> None:
    members = range(len(sequences))
    scores = [float(data.draw(st.integers(0, 1))) for _ in members]
    groups = [data.draw(st.integers(3, 4)) for _ in members]
    expected = []
    for i in members:
        shared = 0
        for j in members:
            if groups[i] == groups[j] and scores[i] != scores[j]:
                length = 0
                for mine, other in zip(sequences[i], sequences[j], strict=False):
                    if mine != other:
                        break
                    length += 1
                shared = max(shared, length)
        masked = shared if min_tokens <= shared < len(sequences[i]) else 0
        expected.append([place >= masked for place in range(len(sequences[i]))])
    assert kept_tokens(sequences, scores, min_tokens, groups) == expected


def m2po(distances: list[float], threshold: float) -> list[bool]:
    old, mask = torch.zeros(len(distances)), torch.ones(len(distances), dtype=torch.bool)
    return m2po_filter(old, torch.tensor(distances), mask, m2_threshold=threshold).tolist()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (1.3, [True, True, True, True]),
        (1.25, [False, True, True, True]),  # the mean of all four is 1.2625
        (0.5, [False, True, True, True]),  # (.01 + .04 + 1) / 3 = .35
        (0.3, [False, True, False, True]),
        (0.02, [False, False, False, True]),
        (0.001, [False, False, False, True]),  # the nearest always stays
    ],
)
def test_m2po_by_hand(threshold: float, expected: list[bool]) -> None:
    """Squared distances 4, .04, 1 and .01, of both signs."""
    assert m2po([2.0, -0.2, -1.0, 0.1], threshold) == expected


def test_m2po_threshold_is_exclusive_and_equals_go_together() -> None:
    assert m2po([0.0, 1.0], 0.5) == [True, False]
    assert m2po([0.0, 1.0, -1.0], 0.6) == [True, False, False]
    assert m2po([1.0, -1.0, 1.0], 0.1) == [True, True, True]


@settings(max_examples=60)
@given(
    distances=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    threshold=st.sampled_from([0.1, 0.7, 2.3, 4.9, 30.0]),
    rank=st.integers(0, 12),
    shuffle=st.randoms(),
)
def test_m2po_equals_a_slow_loop_on_one_rank_and_on_two(
    distances: list[int], threshold: float, rank: int, shuffle: random.Random
) -> None:
    left = sorted(d * d for d in distances)
    while sum(left) / len(left) >= threshold and left[0] < left[-1]:
        left = [d for d in left if d < left[-1]]
    expected = [d * d in left for d in distances]
    assert m2po([float(d) for d in distances], threshold) == expected

    order = list(range(len(distances)))
    shuffle.shuffle(order)
    proximal = torch.tensor([distances[i] for i in order], dtype=torch.float32)
    parts, kept = (proximal[:rank], proximal[rank:]), []
    for own, other in (parts, parts[::-1]):
        everything = torch.cat((other.double().square(), own.double().square()))
        mask = torch.ones_like(own, dtype=torch.bool)
        found = m2po_filter(
            torch.zeros_like(own), own, mask, m2_threshold=threshold, gather=lambda _, all_=everything: all_
        )
        kept += found.tolist()
    assert kept == [expected[i] for i in order]


def test_m2po_neither_counts_nor_keeps_masked_units() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    proximal = torch.tensor([[0.1, float("nan")], [50.0, 0.3]])
    assert m2po_filter(torch.zeros(2, 2), proximal, mask, m2_threshold=0.06).tolist() == mask.tolist()
    assert m2po_filter(torch.zeros(2, 2), proximal, mask, m2_threshold=0.04).tolist() == [[True, False], [False, False]]
    near = proximal.masked_fill(~mask, 0.0)
    assert m2po_filter(torch.zeros(2, 2), near, mask, m2_threshold=0.04).tolist() == [[True, False], [False, False]]
    nothing = torch.zeros_like(mask)
    assert not m2po_filter(torch.zeros(2, 2), proximal, nothing, m2_threshold=1.0).any()


def test_behaviour_filter_keeps_weights_up_to_the_cap() -> None:
    """Weights 1, 4.9, 5.1 and .01 and a masked one: only what is above the cap goes."""
    proximal = torch.tensor([1.0, 4.9, 5.1, 0.01, 1.0]).log()
    mask = torch.tensor([True] * 4 + [False])
    got = behaviour_filter(torch.zeros(5), proximal, mask, cap=5.0)
    assert got.tolist() == [True, True, False, True, False]
    assert behaviour_filter(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), cap=1.0).tolist() == [True]


def test_behaviour_filter_at_the_sequence_level_keeps_or_drops_whole_samples() -> None:
    """Geometric means of [2, 8] and [1, 9] are 4 and 3; the masked unit does not count."""
    proximal = torch.tensor([[2.0, 8.0, 1e6], [1.0, 9.0, 1.0]]).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    got = behaviour_filter(torch.zeros(2, 3), proximal, mask, cap=3.5, level="sequence")
    assert got.tolist() == [[False] * 3, [True, True, False]]
