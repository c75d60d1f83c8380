"""The training loop's arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.tasks.loop import TrainingLoop


@given(max_steps=st.integers(1, 40), interval=st.integers(-1, 12), at_end=st.booleans())
def test_evaluations_to_come(max_steps: int, interval: int, at_end: bool) -> None:
    interval = interval or -1
    runner = SimpleNamespace(max_steps=max_steps, val_check_interval=interval, eval_at_end=at_end)
    loop: Any = SimpleNamespace(config=SimpleNamespace(runner=runner))
    for done in range(max_steps + 1):
        later = [step for step in range(done + 1, max_steps + 1) if TrainingLoop._evaluates_after(loop, step)]
        assert TrainingLoop._evaluations_after(loop, done) == len(later)
