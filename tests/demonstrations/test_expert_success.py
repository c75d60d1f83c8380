from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_rl.demonstrations.expert_success import Evaluation, play_episode, reset_states
from embodied_rl.envs.dummy import DummyEnv, DummyExpert, DummyParams

PLAN = Evaluation(task_ids=None, episodes_per_task=2, max_episode_steps=40, noise_seed=None)


@pytest.fixture
def env() -> DummyEnv:
    return DummyEnv(1, DummyParams(), seed=0)  # 4 tasks with 64 initial states each


def test_states_are_spread_evenly_over_each_task(env: DummyEnv) -> None:
    assert reset_states(env, PLAN) == [0, 32, 64, 96, 128, 160, 192, 224]
    assert reset_states(env, replace(PLAN, task_ids=[3], episodes_per_task=3)) == [192, 213, 234]
    assert reset_states(env, replace(PLAN, episodes_per_task=64)) == list(range(256))


@pytest.mark.parametrize("episodes", [0, 65])
def test_a_task_has_so_many_states(env: DummyEnv, episodes: int) -> None:
    with pytest.raises(ValueError, match=f"got {episodes}, expected 1 to 64"):
        reset_states(env, replace(PLAN, episodes_per_task=episodes))


def test_an_episode_ends_with_success_or_at_the_horizon(env: DummyEnv) -> None:
    expert = DummyExpert(env)
    full = play_episode(env, expert, 130, PLAN)
    assert (full.task_id, full.reset_state_id, full.success, full.episode_return) == (2, 130, True, 1.0)
    assert full.episode_length > 1
    in_time = play_episode(env, expert, 130, replace(PLAN, max_episode_steps=full.episode_length))
    assert in_time == full
    late = play_episode(env, expert, 130, replace(PLAN, max_episode_steps=full.episode_length - 1))
    assert (late.success, late.episode_return, late.episode_length) == (False, 0.0, full.episode_length - 1)


def test_noise_is_a_function_of_its_seed_and_the_state(env: DummyEnv) -> None:
    expert = DummyExpert(env)

    def lengths(seed: int | None) -> list[int]:
        plan = replace(PLAN, noise_seed=seed)
        return [play_episode(env, expert, state, plan).episode_length for state in reset_states(env, plan)]

    assert lengths(1) == lengths(1)
    assert len({tuple(lengths(seed)) for seed in (None, 1, 2)}) == 3
