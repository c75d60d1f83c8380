from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.demonstrations.play import Noise, play
from embodied_rl.envs.base import SimObs
from tests.fakes import Script, ScriptedSim


class Counting:
    """Acts 0.1, 0.2, ... and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def start(self, generator: np.random.Generator) -> None:
        self.seen = []

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        assert instruction == "task 1"
        self.seen.append(float(obs.state[0, 2]))
        return np.full(2, 0.1 * len(self.seen), np.float32)


SCRIPTS = [
    Script(rewards=[], success=[]),
    Script(rewards=[0.1, 0.2, 1.0, 0.0], success=[False, False, True, False]),
]


def test_every_step_is_seen_and_success_ends_it() -> None:
    sim, player = ScriptedSim(1, SCRIPTS, image_size=4), Counting()
    done: list[int] = []
    steps = play(sim, 1, player, generator=np.random.default_rng(0), max_steps=4, on_step=done.append)
    assert steps.state[:, 2].tolist() == [0, 1, 2] == player.seen
    assert steps.images["cam"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert steps.actions[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert steps.rewards.tolist() == pytest.approx([0.1, 0.2, 1.0])
    assert steps.success.tolist() == [False, False, True]
    assert done == [1, 2, 3]


def test_the_horizon_ends_it_too() -> None:
    sim = ScriptedSim(1, SCRIPTS)
    steps = play(sim, 1, Counting(), generator=np.random.default_rng(0), max_steps=2)
    assert steps.success.tolist() == [False, False]


def test_noise_is_executed_and_not_recorded() -> None:
    sim = ScriptedSim(1, SCRIPTS)
    noise = Noise(0.5, 0.8, np.random.default_rng(0), 2)
    steps = play(sim, 1, Counting(), generator=np.random.default_rng(0), noise=noise, max_steps=3)
    assert steps.actions[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    expected = Noise(0.5, 0.8, np.random.default_rng(0), 2)
    executed = [np.clip(0.1 + expected.next()[0], -1, 1), np.clip(0.2 + expected.next()[0], -1, 1)]
    assert steps.state[1:, 3].tolist() == pytest.approx(executed)  # the env's last action
    assert abs(executed[0] - 0.1) > 0.01


def test_noise_has_its_deviation_and_correlation() -> None:
    noise = Noise(0.3, 0.8, np.random.default_rng(0), 2000)
    values = np.stack([noise.next() for _ in range(50)])
    assert values[0].std() == pytest.approx(0.3, rel=0.1) and values[-1].std() == pytest.approx(0.3, rel=0.1)
    assert np.corrcoef(values[10], values[11])[0, 1] == pytest.approx(0.8, abs=0.05)
    assert np.corrcoef(values[10], values[14])[0, 1] == pytest.approx(0.8**4, abs=0.07)
