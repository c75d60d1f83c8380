from __future__ import annotations

from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.cli import config_of
from embodied_rl.demonstrations.plan import CONFIG, Job, conflicts, plan, share
from embodied_rl.errors import UserError
from embodied_rl.schema import CollectConfig, CollectSection


@pytest.fixture(scope="module")
def collect() -> CollectSection:
    config = config_of("task=collect", "env=dummy")
    assert isinstance(config, CollectConfig)
    return replace(config.collect, episodes_per_task=3, max_attempts=2, skip_states=4)


TASKS = {0: range(0, 10), 5: range(10, 20)}


def states(jobs: list[Job]) -> list[list[int]]:
    return [[a.reset_state_id for a in job.attempts] for job in jobs]


def test_the_first_states_are_left_to_evaluation(collect: CollectSection) -> None:
    # Six states of each task are left: three demonstrations, and three others for second attempts.
    jobs = plan(TASKS, collect, {})
    assert states(jobs) == [[4, 7], [5, 8], [6, 9], [14, 17], [15, 18], [16, 19]]
    assert [job.task_id for job in jobs] == [0, 0, 0, 5, 5, 5]


def test_only_what_is_missing_is_played(collect: CollectSection) -> None:
    outcomes = {(0, 0, 0): True, (0, 1, 0): False, (0, 2, 0): False, (0, 2, 1): False}
    assert states(plan({0: TASKS[0]}, collect, outcomes)) == [[8]]


def test_states_are_used_again_when_they_run_out(collect: CollectSection) -> None:
    many = replace(collect, episodes_per_task=8, max_attempts=1)
    assert states(plan({0: TASKS[0]}, many, {})) == [[4], [5], [6], [7], [8], [9], [4], [5]]
    with pytest.raises(UserError, match="has 6 initial states for demonstrations, and without noise"):
        plan(TASKS, replace(many, expert_noise=False, noise=0.0), {})
    with pytest.raises(UserError, match="task 0 has 10 initial states, so none is left"):
        plan(TASKS, replace(collect, skip_states=10), {})


def carried_out(
    section: CollectSection, good: set[int], played: dict[tuple[int, int, int], int], *, stop: int = 1000
) -> dict[tuple[int, int, int], int]:
    """(task, demonstration, attempt) -> its initial state: of what was ``played``, and of at most ``stop`` episodes
    more, the last jobs' first, as quick workers might. Those from ``good`` states succeed."""
    found, left = dict(played), stop
    outcomes = {key: state in good for key, state in found.items()}
    for job in reversed(plan({0: range(10)}, section, outcomes, played=played.values())):
        for attempt in job.attempts:
            if left == 0:
                return found
            left -= 1
            found[0, attempt.demonstration, attempt.number] = attempt.reset_state_id
            if attempt.reset_state_id in good:
                break
    return found


def test_without_noise_no_state_is_played_twice(collect: CollectSection) -> None:
    exact = replace(collect, expert_noise=False, noise=0.0, max_attempts=3)
    assert states(plan({0: TASKS[0]}, exact, {})) == [[4, 7], [5, 8], [6, 9]]
    before = carried_out(exact, good={4, 6}, played={})
    assert sorted(before.values()) == [4, 5, 6, 8], "two attempts at the second"
    more = replace(exact, episodes_per_task=6)
    jobs = plan({0: TASKS[0]}, more, {key: state in {4, 6} for key, state in before.items()}, played=before.values())
    assert [(job.attempts[0].demonstration, states([job])) for job in jobs] == [(3, [[7]]), (4, [[9]])]


@given(
    good=st.sets(st.integers(4, 9)),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(sorted),
    stops=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_nor_after_more_were_asked_for_wherever_it_was_stopped(
    collect: CollectSection, good: set[int], sizes: list[int], stops: list[int]
) -> None:
    whole: dict[tuple[int, int, int], int] = {}
    parts: dict[tuple[int, int, int], int] = {}
    for size, stop in zip(sizes, stops, strict=False):
        section = replace(collect, expert_noise=False, noise=0.0, max_attempts=4, episodes_per_task=size)
        whole = carried_out(section, good, whole)
        parts = carried_out(section, good, carried_out(section, good, parts, stop=stop))
    assert whole == parts
    assert len(set(whole.values())) == len(whole)


@given(count=st.integers(0, 40), workers=st.integers(1, 7))
def test_shares_are_everything_once_and_alike(count: int, workers: int) -> None:
    jobs = [Job(task_id=i, attempts=()) for i in range(count)]
    shares = [share(jobs, rank, workers) for rank in range(workers)]
    assert list(chain(*shares)) == jobs
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_episode_draws_the_same_wherever_it_is_played(collect: CollectSection) -> None:
    [first, *_, last] = plan(TASKS, collect, {})
    a, b = first.attempts
    draws = [[g.random() for g in attempt.generators(0)] for attempt in (a, b, last.attempts[0], a)]
    assert draws[0] == draws[3]
    assert len({value for pair in draws for value in pair}) == 6
    assert [g.random() for g in a.generators(1)] != draws[0]


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({"max_cached_scenes": 2, "render_width": 64}, None),  # of the machine
        ({"reward": "success", "cameras": ["agentview", "wrist"]}, None),  # its defaults
        ({"reward": "progress"}, "env.init_params was"),
    ],
)
def test_what_changes_no_episode_may_differ(tmp_path: Path, now: dict[str, object], reason: str | None) -> None:
    config = config_of("task=collect", "env=libero_10", "model=tiny_vla", "algorithm=ppo", f"collect.path={tmp_path}")
    assert isinstance(config, CollectConfig)
    (tmp_path / CONFIG).parent.mkdir()
    (tmp_path / CONFIG).write_text(yaml.safe_dump(asdict(config)))
    env = replace(config.env, init_params={**config.env.init_params, **now})
    found = list(conflicts(replace(config, env=env), {}))
    assert len(found) == (reason is not None)
    assert all(reason in problem for problem in found if reason)
