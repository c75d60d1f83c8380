from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.envs.base import SimEnv, Task
from embodied_rl.envs.reset_states import (
    after_evaluation,
    eval_reset_states,
    first_lengths,
    task_ranges,
    train_reset_states,
)
from embodied_rl.errors import UserError
from tests.fakes import Script, ScriptedSim

TASKS = {0: range(0, 4), 1: range(4, 10), 2: range(10, 13)}


def sim(num_states: int, states_per_task: int) -> SimEnv:
    return ScriptedSim(1, [Script(rewards=[], success=[])] * num_states, states_per_task=states_per_task)


def draw(tasks: dict[int, range] = TASKS, **overrides: Any) -> list[int]:
    options: dict[str, Any] = {"num_groups": 6, "group_size": 2, "seed": 7, "fixed": False, "step": 0}
    return train_reset_states(tasks, **{**options, "rollout_epoch": 0, **overrides}).tolist()


def test_task_ranges_of_tasks_with_a_rest() -> None:
    assert task_ranges(sim(8, 3)) == {0: range(0, 3), 1: range(3, 6), 2: range(6, 8)}


def test_task_ranges_asks_little_of_a_huge_simulator() -> None:
    class Huge(ScriptedSim):
        asked = 0

        def task(self, reset_state_id: int) -> Task:
            self.asked += 1
            return Task(task_id=0, instruction="", suite="")

    huge = Huge(1, [])
    huge.num_reset_states = 2**40
    assert task_ranges(huge) == {0: range(2**40)}
    assert huge.asked < 100
    assert len(set(draw(task_ranges(huge), num_groups=64))) == 64


def test_chosen_tasks_keep_the_order_given() -> None:
    assert list(task_ranges(sim(9, 3), [2, 0]).items()) == [(2, range(6, 9)), (0, range(0, 3))]


def test_training_leaves_each_tasks_first_states_to_evaluation() -> None:
    assert after_evaluation(TASKS, skip=0, key="k") == TASKS
    assert after_evaluation(TASKS, skip=2, key="k") == {0: range(2, 4), 1: range(6, 10), 2: range(12, 13)}
    with pytest.raises(UserError, match=r"skip_states: got 3, but task 2 has 3 initial states"):
        after_evaluation(TASKS, skip=3, key="env.train.skip_states")


@pytest.mark.parametrize("task_ids", [[0, 9], [], [1, 1]])
def test_wrong_task_ids_are_refused(task_ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"expected some of \[0, 1, 2\]"):
        task_ranges(sim(9, 3), task_ids)


def test_states_not_ordered_by_task_are_refused() -> None:
    class Mixed(ScriptedSim):
        def task(self, reset_state_id: int) -> Task:
            return Task(task_id=(0, 1, 0)[reset_state_id], instruction="", suite="")

    with pytest.raises(ValueError, match="Mixed: task 0 owns reset states"):
        task_ranges(Mixed(1, [Script(rewards=[], success=[])] * 3))


def test_members_of_a_group_share_a_state_and_groups_differ() -> None:
    ids = np.asarray(draw()).reshape(6, 2)
    assert (ids[:, 0] == ids[:, 1]).all()
    assert len(set(ids[:, 0])) == 6


def test_known_draws() -> None:
    """Pinned: a resumed run must meet the states that the interrupted one would have met."""
    assert draw(group_size=1) == [0, 2, 8, 6, 11, 10]
    assert draw(group_size=1, fixed=True) == [2, 3, 8, 7, 10, 11]


def test_fixed_states_depend_on_the_seed_alone() -> None:
    first = draw(fixed=True)
    assert first == draw(fixed=True, step=5, rollout_epoch=3, episode=2)
    assert first != draw(fixed=True, seed=8)


@pytest.mark.parametrize("changed", ["seed", "step", "rollout_epoch", "episode"])
def test_other_states_are_drawn_for_every(changed: str) -> None:
    tasks = {0: range(1000)}
    assert draw(tasks, **{changed: 1}) == draw(tasks, **{changed: 1})
    assert draw(tasks, **{changed: 1}) != draw(tasks, **{changed: 2})


def test_step_epoch_and_episode_are_not_interchangeable() -> None:
    tasks = {0: range(10**6)}
    keys = [{}, {"step": 1}, {"rollout_epoch": 1}, {"episode": 1}, {"fixed": True}]
    assert len({tuple(draw(tasks, **key)) for key in keys}) == 5


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    num_groups=st.integers(1, 40),
    group_size=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    step=st.integers(0, 10**6),
    fixed=st.booleans(),
)
def test_even_over_tasks_and_states(
    sizes: list[int], num_groups: int, group_size: int, seed: int, step: int, fixed: bool
) -> None:
    bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    tasks = {10 + i: range(bounds[i], bounds[i + 1]) for i in range(len(sizes))}
    ids = draw(tasks, num_groups=num_groups, group_size=group_size, seed=seed, step=step, fixed=fixed)
    assert len(ids) == num_groups * group_size
    groups = ids[::group_size]
    assert ids == [state for state in groups for _ in range(group_size)]
    per_task = []
    for states in tasks.values():
        uses = Counter(state for state in groups if state in states)
        per_task.append(uses.total())
        used = [uses[state] for state in states]
        assert max(used) - min(used) <= 1
    assert sum(per_task) == num_groups
    assert max(per_task) - min(per_task) <= 1


def test_weights_decide_how_many_groups_a_task_has() -> None:
    groups = draw({0: range(100), 1: range(100, 200)}, num_groups=8, group_size=1, weights={0: 0.06, 1: 0.18})
    assert [state >= 100 for state in groups] == [False] * 2 + [True] * 6
    assert len(set(groups)) == 8


def test_the_odd_group_visits_every_task_in_time() -> None:
    """One group, three tasks: over the steps all of them get their turn."""
    tasks_met = {draw(num_groups=1, group_size=1, step=step)[0] for step in range(60)}
    assert all(tasks_met & set(states) for states in TASKS.values())


def test_evaluation_covers_the_first_states_of_each_task() -> None:
    ids = eval_reset_states(TASKS, episodes_per_task=3)
    assert ids.dtype == np.int64
    assert ids.tolist() == [0, 1, 2, 4, 5, 6, 10, 11, 12]
    assert eval_reset_states(task_ranges(sim(9, 3), [2]), episodes_per_task=2).tolist() == [6, 7]


@pytest.mark.parametrize("episodes_per_task", [0, 4])
def test_more_episodes_than_states_are_refused(episodes_per_task: int) -> None:
    with pytest.raises(UserError, match="expected 1 to"):
        eval_reset_states(TASKS, episodes_per_task=episodes_per_task)


def test_first_lengths_are_spread_over_groups_up_to_the_longest() -> None:
    assert first_lengths(4, group_size=1, longest=10) == [3, 5, 8, 10]
    assert first_lengths(6, group_size=2, longest=30) == [10, 10, 20, 20, 30, 30]
    assert first_lengths(4, group_size=1, longest=2) == [1, 1, 2, 2]
