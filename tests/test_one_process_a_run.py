"""One process at a time trains in a run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from embodied_rl.errors import UserError
from embodied_rl.files import locked
from embodied_rl.launch import carry_out, run
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.planning import plan_of
from tests.configs import tiny_run
from tests.test_end_to_end import metrics_of, only_run

QUICK = ("cluster=serial", "runner.save_interval=1", "runner.eval_at_end=false")


class EachStep(Hooks):
    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(step)


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *QUICK, "runner.max_steps=3")

    def again(step: int) -> None:
        directory = only_run(config)
        before = (directory / "config.yaml").read_text()
        longer = tiny_run(tmp_path, *QUICK, "runner.max_steps=9", f"runner.resume_dir={directory}")
        with pytest.raises(UserError, match=rf"^{directory}: another process trains in it; wait until it has ended"):
            run(longer)
        assert (directory / "config.yaml").read_text() == before

    carry_out(plan_of(config), hooks=EachStep(again))
    assert [row["step"] for row in metrics_of(only_run(config))] == [1, 2, 3]
    run(tiny_run(tmp_path, *QUICK, "runner.max_steps=4", "runner.resume_dir=auto"))  # the first has let it go


def test_a_run_is_evaluated_while_it_trains(tmp_path: Path) -> None:
    run(tiny_run(tmp_path, *QUICK, "runner.max_steps=1"))
    [directory] = (tmp_path / "results").glob("*/*")
    with locked(directory / ".lock"):
        run(tiny_run(tmp_path, *QUICK, "runner.only_eval=true", "runner.resume_dir=auto"))
    assert len(list((tmp_path / "results").glob("*/*-eval/eval_step_*"))) == 1


@pytest.mark.cold_start
def test_workers_do_not_hold_it(tmp_path: Path) -> None:
    """One that outlives a driver which was killed would keep the run from going on."""
    config = tiny_run(tmp_path, *QUICK, "cluster=process", "runner.max_steps=1")
    driver, found = psutil.Process(), list[list[psutil.Process]]()

    def look(step: int) -> None:
        lock = str(only_run(config) / ".lock")
        processes = [driver, *driver.children(recursive=True)]
        assert len(processes) > 3
        found.append([one for one in processes if lock in [file.path for file in one.open_files()]])

    carry_out(plan_of(config), hooks=EachStep(look))
    assert found == [[driver]]
