"""Runs that end when an evaluation is good enough."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from embodied_rl.checkpoints.store import complete_checkpoints
from embodied_rl.launch import run
from embodied_rl.tasks.embodied.run import EmbodiedRunner
from embodied_rl.tasks.math.run import MathRunner
from tests.configs import tiny_math_run, tiny_run
from tests.test_end_to_end import only_run

OPTIONS = ("runner.max_steps=9", "runner.val_check_interval=1", "runner.stop_at=0.5", "runner.save_interval=9")


@pytest.mark.parametrize(
    ("make", "runner", "more"),
    [
        (tiny_run, EmbodiedRunner, ("cluster=serial",)),
        (tiny_run, EmbodiedRunner, ("cluster=process", "rollout.max_staleness=2")),
        (tiny_run, EmbodiedRunner, ("cluster=process", "rollout.max_staleness=1", "rollout.chunks_ahead=1")),
        (tiny_math_run, MathRunner, ("cluster=serial",)),
        (tiny_math_run, MathRunner, ("cluster=process", "rollout.max_staleness=2")),
    ],
)
def test_the_run_ends_with_a_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: object,
    runner: type,
    more: tuple[str, ...],
) -> None:
    rates = iter([0.49, math.nan, 0.5])  # the second verified nothing
    evaluate = runner.evaluate

    def evaluated(self: object, step: int) -> float:
        assert 0 <= evaluate(self, step) <= 1
        return next(rates)

    monkeypatch.setattr(runner, "evaluate", evaluated)
    config = make(tmp_path, *OPTIONS, *more)  # type: ignore[operator]
    run(config)
    assert [path.name for path in complete_checkpoints(only_run(config) / "checkpoints")] == ["global_step_3"]
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "step 3: evaluated at 50.0%, at least runner.stop_at=50.0%: the end; checkpoint of step 3 is complete" in said
    )
