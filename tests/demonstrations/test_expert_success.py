from __future__ import annotations

import pytest

from embodied_rl.demonstrations.play import play_expert, spread_states
from embodied_rl.envs.dummy import DummyEnv, DummyExpert, DummyParams


@pytest.fixture
def env() -> DummyEnv:
    return DummyEnv(1, DummyParams(), seed=0)  # 4 tasks with 64 initial states each


def test_states_are_spread_evenly_over_each_task(env: DummyEnv) -> None:
    assert spread_states(env, None, 2) == [0, 32, 64, 96, 128, 160, 192, 224]
    assert spread_states(env, [3], 3) == [192, 213, 234]
    assert spread_states(env, None, 64) == list(range(256))


@pytest.mark.parametrize("episodes", [0, 65])
def test_a_task_has_so_many_states(env: DummyEnv, episodes: int) -> None:
    with pytest.raises(ValueError, match=f"got {episodes}, expected 1 to 64"):
        spread_states(env, None, episodes)


def test_an_episode_ends_with_success_or_at_the_horizon(env: DummyEnv) -> None:
    expert = DummyExpert(env)
    full = play_expert(env, expert, 130, max_steps=40)
    assert (full.task_id, full.reset_state_id, full.success, full.episode_return) == (2, 130, True, 1.0)
    assert full.episode_length > 1
    in_time = play_expert(env, expert, 130, max_steps=full.episode_length)
    assert in_time == full
    late = play_expert(env, expert, 130, max_steps=full.episode_length - 1)
    assert (late.success, late.episode_return, late.episode_length) == (False, 0.0, full.episode_length - 1)


def test_noise_is_a_function_of_its_seed_and_the_state(env: DummyEnv) -> None:
    expert = DummyExpert(env)

    def lengths(seed: int | None) -> list[int]:
        states = spread_states(env, None, 2)
        return [play_expert(env, expert, s, max_steps=40, noise_seed=seed).episode_length for s in states]

    assert lengths(1) == lengths(1)
    assert len({tuple(lengths(seed)) for seed in (None, 1, 2)}) == 3
