from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.demonstrations.play import Bursts, Noise, play, succeeded
from embodied_rl.envs.base import SimObs
from tests.envs.test_chunked import chunked, numbered_actions
from tests.fakes import Script, ScriptedSim


class Counting:
    """Acts 0.1, 0.2, ... and remembers what it saw."""

    def __init__(self, told: str = "task 1") -> None:
        self.seen: list[float] = []
        self._told = told

    def start(self, generator: np.random.Generator) -> None:
        self.seen = []

    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        assert instruction == self._told
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


@pytest.mark.parametrize("ends", [[False, True], [False] * 3])
def test_what_the_simulator_ends_is_told_from_what_is_cut_off(ends: list[bool]) -> None:
    script = Script(rewards=[0.1, 0.2, 0.3], success=[False] * 3, terminated=ends)
    steps = play(
        ScriptedSim(1, [script, script]), 0, Counting("task 0"), generator=np.random.default_rng(0), max_steps=3
    )
    assert (len(steps.success), steps.terminated) == (len(ends), any(ends))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("threshold", [None, -2.5, -3.0, -6.5, -7.0])
@pytest.mark.parametrize("state", [0, 1, 2], ids=["to the horizon", "ended by the simulator", "to the goal"])
def test_success_is_what_the_envs_of_training_take_for_it(relative: bool, threshold: float | None, state: int) -> None:
    paid = [-1.0, -2.0, -4.0], [-1.0, -2.0], [-9.0]
    ends = [[False] * 3, [False, True], [False]]
    scripts = [
        Script(
            rewards=np.cumsum(rewards).tolist() if relative else rewards,
            success=[len(rewards) == 1] * len(rewards),
            terminated=end,
        )
        for rewards, end in zip(paid, ends, strict=True)
    ]
    sims = [ScriptedSim(1, scripts) for _ in range(2)]
    for sim in sims:
        sim.success_return = threshold  # type: ignore[attr-defined]
    env = chunked(sims[0], 1, 3, max_episode_steps=3, use_rel_reward=relative, ignore_terminations=False)
    env.reset([state])
    env.chunk_step(numbered_actions(1, 3))
    [record] = env.drain_episodes()
    player = Counting(f"task {state}")
    steps = play(sims[1], state, player, generator=np.random.default_rng(0), max_steps=3)
    assert succeeded(sims[1], steps, use_rel_reward=relative) == record.success
    assert steps.success.tolist() == [state == 2] * len(paid[state]), "the goal's own, which ends an episode"


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


def test_a_burst_is_the_same_in_all_its_steps_and_nothing_comes_between() -> None:
    noise = Bursts(0.3, 3, 11, np.random.default_rng(0), 2)
    values = np.stack([noise.next() for _ in range(20_000)])
    there = values.any(1)
    edges = np.flatnonzero(np.diff(there.astype(int), prepend=0, append=0))
    values = np.concatenate([values, np.zeros((1, 2))])
    drawn = [values[first:last:3] for first, last in zip(edges[::2], edges[1::2], strict=True)]
    for first, last in list(zip(edges[::2], edges[1::2], strict=True))[:-1]:
        assert (last - first) % 3 == 0, "whole bursts, of which one may follow at once"
        assert np.array_equal(values[first:last], np.repeat(values[first:last:3], 3, axis=0))
    # a burst begins at each step without one with probability 1/12, so 11 come before it on average
    assert (~there).sum() / sum(map(len, drawn)) == pytest.approx(11, rel=0.1)
    assert np.concatenate(drawn).std(0) == pytest.approx([0.3, 0.3], rel=0.1)


def test_bursts_are_marked_and_other_noise_is_not() -> None:
    script = Script(rewards=[0.1] * 40, success=[False] * 40)
    noise, same = (Bursts(0.5, 2, 4, np.random.default_rng(3), 2) for _ in range(2))
    sim = ScriptedSim(1, [script])
    steps = play(sim, 0, Counting("task 0"), generator=np.random.default_rng(0), noise=noise, max_steps=12)
    added = np.stack([same.next() for _ in range(12)])
    assert steps.disturbed is not None and 0 < steps.disturbed.sum() < 12
    assert steps.disturbed.tolist() == added.any(1).tolist()
    assert steps.actions[:, 0].tolist() == pytest.approx(np.minimum(0.1 * np.arange(1, 13), 1.0).tolist())
    executed = np.clip(steps.actions + added, -1, 1)
    assert steps.state[1:, 3].tolist() == pytest.approx(executed[:-1, 0].tolist(), abs=1e-6)
    assert (rest := steps.since(5)) is not None and rest.disturbed is not None
    assert rest.disturbed.tolist() == steps.disturbed[5:].tolist()
    lasting = Noise(0.5, 0.8, np.random.default_rng(0), 2)
    for other in (lasting, None):
        steps = play(sim, 0, Counting("task 0"), generator=np.random.default_rng(0), noise=other, max_steps=3)
        assert steps.disturbed is None
