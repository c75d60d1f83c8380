"""``status`` from another shell, of runs that go on, ended, or were killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from embodied_rl.cli import main
from embodied_rl.commands import status
from embodied_rl.launch import run
from embodied_rl.monitoring.progress import Progress
from embodied_rl.monitoring.status import STATUS_FILE, StatusWriter, content
from embodied_rl.report.facts import FACTS_FILE, note_end, note_start
from embodied_rl.runtime.worker import WorkerProgress
from tests.configs import tiny_run
from tests.test_end_to_end import only_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "experiment" / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    note_start(folder, ["env=dummy"])
    return folder


def test_a_run_that_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "run.log").write_text("first\nlast but one\nlast\n")
    with Progress(total_steps=9, initial_step=2) as progress:
        progress.begin_steps()
        progress.restarts, progress.recoveries = 2, 1
        progress.advance()
        progress.hear(WorkerProgress(worker="EnvGroup[1]", what="rollout", done=3, total=8))
        with StatusWriter(run_dir, progress, dict):
            assert status.main([str(run_dir.parent), "--lines", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # however a long path wraps it
    assert f"under way (process {os.getpid()} on " in shown
    assert "step 3/9, rollout 3/8" in shown and "s a step" in shown and "left 0:" in shown
    assert "env workers replaced: 2, recovered from a checkpoint: 1" in shown
    assert "EnvGroup[1]" in shown and "rollout 3/8" in shown
    assert "last but one" in shown and "first" not in shown


def test_workers_with_long_names_have_their_processes_and_memory() -> None:
    with Progress(total_steps=9) as progress:
        for number in (1, 10, 11):
            progress.hear(WorkerProgress(worker=f"RolloutGroup[{number}]", what="serve"))
        workers = content(progress, {"RolloutGroup[10]": os.getpid(), "RolloutGroup[11]": 2**22 + 1})["workers"]
    assert workers["RolloutGroup[10]"]["pid"] == os.getpid() and workers["RolloutGroup[10]"]["memory"] > 0
    assert (workers["RolloutGroup[11]"]["pid"], workers["RolloutGroup[11]"]["memory"]) == (2**22 + 1, 0), "it is gone"
    assert workers["RolloutGroup[1]"]["pid"] is workers["RolloutGroup[1]"]["memory"] is None, "it is elsewhere"


@pytest.mark.parametrize(("ending", "code"), list(status.EXIT_STATUS.items()))
def test_the_exit_status_is_the_runs(run_dir: Path, ending: str, code: int) -> None:
    note_end(run_dir, ending)
    for follow in ([], ["--follow"]):
        if code:
            with pytest.raises(SystemExit) as ended:
                main(["status", str(run_dir), *follow])
            assert ended.value.code == code
        else:
            main(["status", str(run_dir), *follow])


def test_a_run_that_was_killed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((run_dir / FACTS_FILE).read_text())
    facts["starts"][-1]["pid"] = 2**22 + 1  # above what Linux gives
    (run_dir / FACTS_FILE).write_text(json.dumps(facts))
    (run_dir / STATUS_FILE).write_text("{")
    assert status.main([str(run_dir)]) == 1
    assert "did not say how it ended" in " ".join(capsys.readouterr().out.split())


def test_a_whole_run_leaves_its_status(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "cluster=serial", "runner.max_steps=2", "runner.save_interval=-1")
    run(config)
    content = json.loads((only_run(config) / STATUS_FILE).read_text())
    assert (content["step"], content["total_steps"]) == (2, 2)
    assert {"EnvGroup[0]", "ActorGroup[0]"} <= content["workers"].keys()
    assert content["step_seconds"] > 0 and content["driver_memory"] > 0
