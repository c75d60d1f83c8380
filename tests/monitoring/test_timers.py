from __future__ import annotations

import pytest

from embodied_rl.monitoring.timers import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_inner_time_does_not_count_for_the_outer_phase() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 7  # before any phase: nobody's
    with timer.phase("outer"):
        clock.now += 1
        with timer.phase("inner"):
            clock.now += 2
            with timer.phase("outer"):
                clock.now += 4
        clock.now += 8
    with timer.phase("inner"):
        clock.now += 16
    assert timer.drain() == {"outer": 13.0, "inner": 18.0}
    assert timer.drain() == {}


def test_whoever_listens_is_told_of_the_time_on_cores_too() -> None:
    clock, cpu = Clock(), Clock()
    told: list[tuple[str, float, float, float]] = []
    timer = PhaseTimer(clock, lambda *phase: told.append(phase), cpu)
    with timer.phase("render"):  # two threads, half of the time
        clock.now += 4
        cpu.now += 3
        with timer.phase("wait"):
            clock.now += 2
            cpu.now += 0.25
    assert told == [("wait", 104.0, 106.0, 0.25), ("render", 100.0, 106.0, 3.25)]


def test_drain_within_a_phase_splits_it() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("env"):
        clock.now += 3
        assert timer.drain() == {"env": 3.0}
        clock.now += 2
    assert timer.drain() == {"env": 2.0}


def test_a_phase_that_raises_is_closed() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)

    def fail() -> None:
        with timer.phase("a"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with timer.phase("b"):
        clock.now += 2
    assert timer.drain() == {"a": 1.0, "b": 2.0}
