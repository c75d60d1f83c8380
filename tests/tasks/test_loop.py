"""The training loop's arithmetic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.launch import run
from embodied_rl.monitoring.progress import Progress
from embodied_rl.schema import EmbodiedConfig, MathConfig
from embodied_rl.tasks.due import evaluates_after
from embodied_rl.tasks.embodied.run import EmbodiedRunner
from embodied_rl.tasks.loop import TrainingLoop
from embodied_rl.tasks.math.run import MathRunner
from tests.configs import tiny_math_run, tiny_run


@given(max_steps=st.integers(1, 40), interval=st.integers(-1, 12), at_end=st.booleans())
def test_evaluations_to_come(max_steps: int, interval: int, at_end: bool) -> None:
    interval = interval or -1
    runner: Any = SimpleNamespace(max_steps=max_steps, val_check_interval=interval, eval_at_end=at_end)
    loop: Any = object.__new__(TrainingLoop)
    loop.config = SimpleNamespace(runner=runner)
    for done in range(max_steps + 1):
        later = [step for step in range(done + 1, max_steps + 1) if evaluates_after(runner, step)]
        assert loop._evaluations_after(done) == len(later)


def robots(directory: Path) -> EmbodiedConfig:
    """Evaluated in 8 episodes of at most 16 steps; trained in 16 envs of 16 steps."""
    return tiny_run(directory, "cluster=serial", "runner.max_steps=1")


def sums(directory: Path) -> MathConfig:
    """Evaluated by 8 prompts, three times each; trained on 6 prompts, four times each."""
    options = ("data.eval_completions=3", "algorithm.sampling_params.temperature_eval=1.0", "runner.max_steps=1")
    return tiny_math_run(directory, *options)


@pytest.mark.parametrize(("make", "loop", "work"), [(robots, EmbodiedRunner, 0.5), (sums, MathRunner, 1.0)])
def test_an_evaluations_work_against_a_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, loop: Any, work: float
) -> None:
    """It is the time left before the first evaluation was timed."""
    found: list[float] = []
    expected: list[float] = []
    count, expect = loop.evaluation_work, Progress.expect_evaluation
    monkeypatch.setattr(loop, "evaluation_work", lambda self: found.append(count(self)) or found[-1])
    monkeypatch.setattr(
        Progress, "expect_evaluation", lambda self, seconds: expected.append(seconds) or expect(self, seconds)
    )
    run(make(tmp_path))
    assert found == [work]
    assert len(expected) == 1 and expected[0] > 0
