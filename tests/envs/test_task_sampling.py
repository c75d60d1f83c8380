from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.envs.task_sampling import FILE, UNKNOWN, TaskSuccess, shares
from embodied_rl.errors import CheckpointError


def episodes(task: int, *successes: bool) -> list[EpisodeRecord]:
    return [
        EpisodeRecord(
            env_id=i, task_id=task, instruction="", reset_state_id=0, success=success, episode_return=0.0,
            episode_length=1,
        )
        for i, success in enumerate(successes)
    ]  # fmt: skip


def test_weights_by_hand() -> None:
    success = TaskSuccess()
    assert success.weights() == {}
    success.add([*episodes(3, True, False), *episodes(5, True, True, True)])
    # p is 2/4 and 4/5.
    assert success.weights() == pytest.approx({3: 0.25, 5: 0.16})
    success.add(episodes(5, False))
    # What was counts for 0.8: 0.8 of 1.6, and 2.4 of 3.4, with one of each added: 1.8/3.6 and 3.4/5.4.
    assert success.weights() == pytest.approx({3: 0.25, 5: 3.4 / 5.4 * 2.0 / 5.4})


def test_a_task_that_nobody_plays_any_more_is_forgotten() -> None:
    success = TaskSuccess()
    success.add(episodes(0, *[False] * 30))
    before = success.weights()[0]
    for _ in range(30):
        success.add([])
    assert before < 0.04
    assert success.weights()[0] == pytest.approx(UNKNOWN, abs=0.001)


def test_a_checkpoint_holds_it(tmp_path: Path) -> None:
    assert TaskSuccess.read(tmp_path) is None
    success = TaskSuccess()
    success.add([*episodes(7, True, False, False), *episodes(1, True)])
    success.write(tmp_path)
    again = TaskSuccess.read(tmp_path)
    assert again is not None
    for one in (success, again):
        one.add(episodes(7, True))
    assert again.weights() == success.weights()


@pytest.mark.parametrize("content", ["", "[]", '{"a": [1, 2]}', '{"1": [1]}', '{"1": 2}', "[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"task_success.json: cannot be read .* use another checkpoint"):
        TaskSuccess.read(tmp_path)


def drawn(num_groups: int, weights: dict[int, float] | None, seed: int = 0) -> list[int]:
    return shares(num_groups, [4, 2, 9], weights, np.random.default_rng(seed)).tolist()


def test_shares_by_hand() -> None:
    assert drawn(9, None) == [3, 3, 3]
    assert drawn(8, {4: 0.1, 2: 0.05, 9: 0.25}) == [2, 1, 5]
    assert drawn(8, {4: 0.125, 2: 0.125}) == [2, 2, 4], "a task that nobody has played weighs the most"


def test_what_rounding_leaves_goes_where_it_took() -> None:
    """Of 2 groups 0.5, 1.5 and 0 are wanted, nearly: the second task has one, and either it or the first the other."""
    weights = {4: 0.5, 2: 1.5, 9: 1e-9}
    draws = [tuple(drawn(2, weights, seed)) for seed in range(400)]
    assert set(draws) == {(1, 1, 0), (0, 2, 0)}
    assert 150 < draws.count((1, 1, 0)) < 250


@given(
    num_groups=st.integers(1, 60),
    weights=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
def test_all_groups_are_given_out_within_one_of_the_share(num_groups: int, weights: list[float], seed: int) -> None:
    by_task = dict(enumerate(weights))
    counts = shares(num_groups, list(by_task), by_task, np.random.default_rng(seed))
    assert counts.sum() == num_groups
    wanted = num_groups * np.array(weights) / sum(weights)
    assert (np.abs(counts - wanted) < 1 + 1e-6).all()
