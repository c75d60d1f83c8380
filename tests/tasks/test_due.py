"""When an evaluation is due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from embodied_rl.tasks.due import evaluates_after, misses_evaluation
from tests.configs import tiny_run


@pytest.mark.parametrize(
    ("step", "there", "missed"), [(4, [], True), (4, [4], False), (4, [2], True), (3, [], False), (6, [], True)]
)
def test_one_is_missed_where_it_was_due(tmp_path: Path, step: int, there: list[int], missed: bool) -> None:
    runner = replace(tiny_run(tmp_path).runner, val_check_interval=2, eval_at_end=True, max_steps=6)
    for done in there:
        (tmp_path / f"eval_step_{done:06d}").mkdir()
        (tmp_path / f"eval_step_{done:06d}/eval.json").touch()
    checkpoint = tmp_path / f"checkpoints/global_step_{step}"
    assert misses_evaluation(runner, checkpoint, step) == missed
    assert not misses_evaluation(runner, tmp_path / f"elsewhere/global_step_{step}", step), "of a run that is not here"
    assert not misses_evaluation(replace(runner, max_steps=step - 1), checkpoint, step), "it is over"


def test_the_last_step_is_one_unless_it_is_asked_not_to_be(tmp_path: Path) -> None:
    runner = replace(tiny_run(tmp_path).runner, val_check_interval=-1, max_steps=3)
    for at_end in (True, False):
        due = [step for step in range(1, 4) if evaluates_after(replace(runner, eval_at_end=at_end), step)]
        assert due == [3] * at_end
