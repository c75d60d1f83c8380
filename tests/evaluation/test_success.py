from __future__ import annotations

import io
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.evaluation.success import SuccessReport, SuccessTable, success_table, wilson_interval


def record(
    task_id: int, success: bool, length: int, episode_return: float = 0.0, state: int = 0, suite: str = ""
) -> EpisodeRecord:
    return EpisodeRecord(
        env_id=0,
        task_id=task_id,
        instruction=f"task {task_id}",
        reset_state_id=state,
        success=success,
        episode_return=episode_return,
        episode_length=length,
        suite=suite,
    )


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (45, 50, 0.7864, 0.9565),
    ],
)
def test_wilson_interval_known_values(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson_interval(successes, episodes) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_other_confidence() -> None:
    # z = 1.644854, n = 10, p = 0.5: centre 0.5, half width z/sqrt(n + z^2)/2 = 0.230728
    assert wilson_interval(5, 10, confidence=0.9) == pytest.approx((0.269272, 0.730728), abs=1e-6)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_properties(counts: tuple[int, int]) -> None:
    successes, episodes = counts
    low, high = wilson_interval(successes, episodes)
    assert 0 <= low <= successes / episodes <= high <= 1
    assert (low == 0) == (successes == 0)
    assert (high == 1) == (successes == episodes)
    assert wilson_interval(episodes - successes, episodes) == pytest.approx((1 - high, 1 - low))
    wider = wilson_interval(successes, episodes, confidence=0.99)
    assert wider[0] <= low
    assert wider[1] >= high


@pytest.mark.parametrize("counts", [(0, 0), (-1, 3), (4, 3)])
def test_wilson_interval_refuses_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="successes <= episodes"):
        wilson_interval(*counts)


def test_success_table_by_hand() -> None:
    table = success_table(
        [
            record(7, True, 50, 1.0),
            record(2, False, 100, 0.25),
            record(7, True, 70, 1.0),
            record(2, True, 40, 1.25),
            record(2, False, 100, 0.0),
            record(2, False, 100, 0.0),
        ]
    )
    assert [row.task_id for row in table.tasks] == [2, 7]
    two, seven = table.tasks
    assert (two.episodes, two.successes, two.success_rate, two.instruction) == (4, 1, 0.25, "task 2")
    assert (two.mean_length, two.mean_success_length, two.mean_return) == (85.0, 40.0, 0.375)
    assert (seven.mean_length, seven.mean_success_length) == (60.0, 60.0)
    assert two.interval == wilson_interval(1, 4)
    assert (table.overall.episodes, table.overall.successes, table.overall.task_id) == (6, 3, None)
    assert table.overall.mean_success_length == pytest.approx(160 / 3)
    assert table.mean_task_success == pytest.approx(0.625), "tasks weigh the same, unlike the pooled 0.5"


def test_suites_are_summed_up_where_there_are_several() -> None:
    easy = [record(3, True, 50, suite="easy"), record(3, True, 50, suite="easy"), record(5, False, 90, suite="easy")]
    hard = [record(4, True, 70, suite="hard"), record(4, False, 90, suite="hard")]
    found = success_table([*hard, *easy]).suites
    assert [(row.suite, row.tasks, row.mean_task_success) for row in found] == [("easy", 2, 0.5), ("hard", 1, 0.5)]
    assert [(row.pooled.successes, row.pooled.episodes) for row in found] == [(2, 3), (1, 2)]
    assert found[0].pooled.interval == wilson_interval(2, 3)
    assert success_table(easy).suites == (), "the row of all tasks says it"


def test_success_table_without_success() -> None:
    assert success_table([record(0, False, 10)]).overall.mean_success_length is None


def test_success_table_does_not_depend_on_the_order_of_episodes() -> None:
    generator = random.Random(0)
    records = [record(i % 5, generator.random() < 0.5, i, generator.uniform(-1, 1), i) for i in range(200)]
    expected = success_table(records)
    for _ in range(5):
        generator.shuffle(records)
        assert success_table(records) == expected


def test_success_table_needs_an_episode() -> None:
    with pytest.raises(ValueError, match="no episode was finished"):
        success_table([])


def test_failures_are_counted_and_shown_where_there_are_some() -> None:
    records = [record(0, success, 10) for success in (True, False, False)]
    fallen = [records[0], *(replace(r, failed=True) for r in records[1:])]
    printed = []
    for episodes in (records, fallen):
        console = Console(width=90, record=True, file=io.StringIO())
        console.print(SuccessReport(success_table(episodes)))
        printed.append(console.export_text())
    assert success_table(fallen).overall.failures == 2
    assert "failed" not in printed[0]
    (total,) = (line.split() for line in printed[1].splitlines() if "1 task" in line)
    assert total[-2:] == ["2", "10"]


def test_success_of_samples_has_a_column() -> None:
    def table(*successes: int) -> SuccessTable:
        return success_table([record(task, i < won, 10) for task, won in enumerate(successes) for i in range(4)])

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(SuccessReport(table(4, 1), sampled=table(2, 0)))
    lines = console.export_text().splitlines()
    heading = next(line for line in lines if "sampled" in line)
    end = heading.index("sampled") + len("sampled")
    cells = [line[:end].split()[-1] for line in lines if "%" in line and line != heading]
    assert cells == ["50.0%", "0.0%", "25.0%"]
