"""What the fault campaign found in damaged files of runs: one message instead of a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied_rl.checkpoints.resume import read_config
from embodied_rl.commands.checkpoint_folder import run_findings
from embodied_rl.commands.status import main
from embodied_rl.composition import stored
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.errors import CheckpointError, UserError
from embodied_rl.evaluation.eval_file import read_evaluation
from embodied_rl.launch import run
from embodied_rl.models.weights.look import read_json
from embodied_rl.report.facts import FACTS_FILE, read_starts
from tests.configs import tiny_run
from tests.demonstrations.recording import record
from tests.test_end_to_end import only_run

DEEP = "[" * 100_000


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    path = tmp_path / "deep.json"
    path.write_text(DEEP)
    return path


def test_files_that_are_nested_too_deeply(deep: Path) -> None:
    with pytest.raises(CheckpointError, match=r"deep\.json: cannot be read \(maximum recursion depth"):
        read_config(deep)
    surrogate = deep.with_name("config.yaml")
    surrogate.write_text('{"model": "\\ud800"}')
    with pytest.raises(CheckpointError, match=r"config\.yaml: cannot be read \(.*surrogates not allowed"):
        read_config(surrogate)
    with pytest.raises(UserError, match=r"deep\.json is no JSON \(it is nested too deeply\)"):
        read_json(deep)
    with pytest.raises(UserError, match=r"deep\.json: cannot be read as JSON \(it is nested too deeply\)"):
        read_evaluation(deep)
    (deep.parent / FACTS_FILE).write_text(DEEP)
    assert read_starts(deep.parent) == []
    (deep.parent / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match=r"has no run\.json"):
        main([str(deep.parent)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got NoneType, expected a run's configuration"),
        ("runner:\n", "runner.task_type: got None, expected one of collect, "),
        ("runner: {task_type: [juggling]}", r"runner.task_type: got \['juggling'\], expected one of collect, "),
    ],
)
def test_a_run_whose_configuration_is_damaged(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.yaml: {said}.*; restore it, or remove it and resume the run"):
        stored(path, [], resume_dir=tmp_path)


def test_a_run_without_its_damaged_configuration_goes_on(tmp_path: Path) -> None:
    """As the message says."""
    quick = ("cluster=serial", "runner.eval_at_end=false", "runner.resume_dir=auto")
    config = tiny_run(tmp_path, *quick, "runner.max_steps=1")
    run(config)
    path = only_run(config) / "config.yaml"
    before = path.read_text()
    path.write_text("")
    assert [finding.what for finding in run_findings(path.parent) if finding.status == "problem"] == ["run"]
    with pytest.raises(CheckpointError, match="restore it, or remove it and resume the run with the same settings"):
        run(tiny_run(tmp_path, *quick, "runner.max_steps=2"))
    path.unlink()
    assert [finding.what for finding in run_findings(path.parent) if finding.status == "warning"] == ["run"]
    run(tiny_run(tmp_path, *quick, "runner.max_steps=2"))
    assert path.read_text() == before.replace("max_steps: 1", "max_steps: 2")


def test_episodes_replaced_by_another_table(tmp_path: Path) -> None:
    root = record(tmp_path / "data", [0, 1])
    [episodes], [frames] = ([*(root / name).rglob("*.parquet")] for name in ("meta/episodes", "data"))
    episodes.write_bytes((root / "meta/tasks.parquet").read_bytes())
    assert frames.exists()
    with pytest.raises(UserError, match=r"meta/episodes.*there is no column episode_index, length"):
        DataSet.open(root).episodes()


def test_a_folder_in_the_place_of_the_log(tmp_path: Path) -> None:
    quick = ("cluster=serial", "runner.eval_at_end=false", "runner.resume_dir=auto")
    config = tiny_run(tmp_path, *quick, "runner.max_steps=1")
    run(config)
    log = only_run(config) / "run.log"
    log.unlink()
    log.mkdir()
    with pytest.raises(UserError, match=r"run\.log: Is a directory; the run writes it: move away what is there"):
        run(tiny_run(tmp_path, *quick, "runner.max_steps=2"))
