"""The LIBERO expert in LIBERO's own scenes; nothing is rendered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.play import play_expert
from embodied_rl.envs.dummy import DummyEnv, DummyParams
from embodied_rl.envs.libero.adapter import LiberoEnv, LiberoParams
from embodied_rl.envs.libero.expert import LiberoExpert
from embodied_rl.errors import UserError

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_10": 520}


@pytest.fixture
def spatial() -> Iterator[LiberoEnv]:
    env = LiberoEnv(1, LiberoParams(task_suite_name="libero_spatial", cameras=()), seed=0)
    yield env
    env.close()


def played(suite: str, state: int, noise_seed: int | None = None) -> EpisodeRecord:
    env = LiberoEnv(1, LiberoParams(task_suite_name=suite, cameras=()), seed=0)
    record = play_expert(env, LiberoExpert(env), state, max_steps=HORIZONS[suite], noise_seed=noise_seed)
    env.close()
    return record


def test_it_wants_its_env() -> None:
    with pytest.raises(UserError, match="got a DummyEnv, expected a LiberoEnv"):
        LiberoExpert(DummyEnv(1, DummyParams(), seed=0))


def test_it_wants_a_reset(spatial: LiberoEnv) -> None:
    with pytest.raises(RuntimeError, match=r"call reset\(0\) first"):
        LiberoExpert(spatial).act(0, None)


def test_noise_varies_the_way_to_the_object_and_nothing_else(spatial: LiberoEnv) -> None:
    expert = LiberoExpert(spatial)

    def way(seed: int | None) -> tuple[NDArray[np.float32], float]:
        """The first actions [12,7], and how far they bring the hand down."""
        spatial.reset([0], [0])
        expert.reset(0)
        generator = None if seed is None else np.random.default_rng(seed)
        above, taken = float(spatial.observe([0]).state[0, 2]), []
        for _ in range(12):
            taken.append(expert.act(0, generator))
            spatial.step([0], taken[-1][None])
        return np.stack(taken), above - float(spatial.observe([0]).state[0, 2])

    plain, down = way(None)
    assert plain.dtype == np.float32 and np.abs(plain).max() <= 1
    assert (plain[:, 6] == -1).all() and down > 0.05  # open, towards the bowl
    noisy, _ = way(1)
    assert np.array_equal(way(1)[0], noisy)
    assert np.abs(noisy[:, :3] - plain[:, :3]).max() > 0.1 and np.abs(noisy).max() <= 1
    assert (noisy[:, 6] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "state"),
    [
        ("libero_spatial", 0),
        pytest.param("libero_spatial", 230, id="a bowl that leans in its drawer, out of which the first grasps slip"),
        pytest.param("libero_spatial", 266, id="a bowl that tips over at first"),
        ("libero_object", 50),
        pytest.param("libero_10", 100, id="a stove's lever and a pot with a handle"),
        pytest.param("libero_10", 150, id="a drawer that the forearm must not meet"),
        pytest.param("libero_10", 233, id="two mugs on two plates"),
        pytest.param("libero_10", 250, id="a book into the narrow compartment"),
        pytest.param("libero_10", 400, id="two pots side by side"),
    ],
)
def test_it_succeeds_within_the_horizon(suite: str, state: int) -> None:
    assert played(suite, state).success


@pytest.mark.slow
def test_it_succeeds_with_noise() -> None:
    plain, noisy = played("libero_spatial", 400), played("libero_spatial", 400, noise_seed=0)
    assert noisy.success and noisy.episode_length > plain.episode_length
