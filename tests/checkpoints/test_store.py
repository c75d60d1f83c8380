from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from embodied_rl.checkpoints.store import (
    STATE_FILE,
    RunState,
    _held,
    begin,
    checkpoint_dir,
    complete_checkpoints,
    find_checkpoint,
    later_checkpoints,
    publish,
    read_state,
    remove_torn,
    resolve,
    seal,
)
from embodied_rl.errors import CheckpointError
from embodied_rl.files import set_aside
from tests.configs import config_of

ACTOR = "actor/shard_00001.safetensors"


def store(run: Path, step: int, *, max_keep: int | None = None, content: str = "weights") -> Path:
    """Save as the runner does."""
    directory = checkpoint_dir(run, step)
    scratch = begin(directory)
    (scratch / "actor").mkdir()
    (scratch / ACTOR).write_text(content)
    seal(scratch, RunState(step=step, policy_version=step))
    publish(scratch, directory, max_keep=max_keep)
    return directory


def steps(run: Path) -> list[int]:
    return [read_state(path).step for path in complete_checkpoints(run / "checkpoints")]


def test_a_published_checkpoint_has_its_place_and_state(tmp_path: Path) -> None:
    directory = store(tmp_path, 12)
    assert directory == tmp_path / "checkpoints/global_step_12"
    content = json.loads((directory / STATE_FILE).read_text())
    sha256 = hashlib.sha256(b"weights").hexdigest()
    assert content.pop("sha256")
    files = {ACTOR: {"bytes": 7, "sha256": sha256}}
    assert content == {"step": 12, "policy_version": 12, "initial": None, "files": files}
    assert read_state(directory) == RunState(step=12, policy_version=12)
    assert [path.name for path in directory.parent.iterdir()] == ["global_step_12"], "nothing else is left"


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        store(tmp_path, step)
    assert steps(tmp_path) == [9, 20, 100]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store(tmp_path, 3, content="old")
    directory = store(tmp_path, 3, content="new")
    assert (directory / ACTOR).read_text() == "new"
    assert [path.name for path in directory.parent.iterdir()] == ["global_step_3"]


def test_max_keep_drops_the_oldest(tmp_path: Path) -> None:
    for step in range(1, 6):
        store(tmp_path, step, max_keep=2)
    assert steps(tmp_path) == [4, 5]
    store(tmp_path, 6, max_keep=1)
    assert steps(tmp_path) == [6]
    for step in (7, 8):
        store(tmp_path, step)
    assert steps(tmp_path) == [6, 7, 8]


def test_a_run_that_went_on_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        store(tmp_path, step)
    store(tmp_path, 15, max_keep=1)  # resumed at 10
    assert steps(tmp_path) == [15, 20, 30]


def test_resolve(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment"
    for run, step in (("2026-01-01", 30), ("2026-01-02", 9), ("2026-01-02", 10)):
        store(experiment / run, step)
    (experiment / "2026-01-03-eval").mkdir()
    newest = experiment / "2026-01-02/checkpoints/global_step_10"
    assert resolve("auto", experiment) == newest, "of the newest run that has one"
    assert resolve(str(experiment / "2026-01-02"), experiment) == newest
    assert resolve(str(experiment / "2026-01-02/checkpoints"), experiment) == newest
    older = experiment / "2026-01-01/checkpoints/global_step_30"
    assert resolve(str(older), experiment) == older
    assert resolve("auto", tmp_path / "nothing") is None


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing: no such directory"):
        resolve(str(tmp_path / "missing"), tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint \(checkpoints/global_step_<N>/state.json\)"):
        resolve(str(tmp_path), tmp_path)


def test_auto_starts_afresh_but_evaluates_nothing_untrained(tmp_path: Path) -> None:
    options = (f"runner.output_dir={tmp_path}", "runner.experiment_name=x", "runner.resume_dir=auto")
    assert find_checkpoint(config_of(*options)) is None
    with pytest.raises(CheckpointError, match=re.escape(f"no run in {tmp_path}/x has a whole checkpoint to evaluate")):
        find_checkpoint(config_of(*options, "runner.only_eval=true"))
    expected = store(tmp_path / "x/2026-01-01", 4)
    assert find_checkpoint(config_of(*options)) == expected
    assert find_checkpoint(config_of(*options, "runner.only_eval=true")) == expected
    assert find_checkpoint(config_of(f"runner.output_dir={tmp_path}", "runner.experiment_name=x")) is None


def test_an_unfinished_checkpoint_is_never_chosen(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment"
    whole = store(experiment / "1", 5)
    scratch = begin(checkpoint_dir(experiment / "1", 6))
    (scratch / STATE_FILE).write_text("{}")  # killed after the state was written and before the rename
    without_state = checkpoint_dir(experiment / "1", 7)
    shutil.copytree(whole, without_state)
    (without_state / STATE_FILE).unlink()
    stranger = whole.with_name("global_step_8.bak")
    shutil.copytree(whole, stranger)
    assert resolve("auto", experiment) == whole
    assert resolve(str(experiment / "1"), experiment) == whole
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        resolve(str(without_state), experiment)


def test_leftovers_of_killed_runs_are_removed_by_the_next_save(tmp_path: Path) -> None:
    store(tmp_path, 1)
    for step in (2, 3):
        (tmp_path / f"checkpoints/.global_step_{step}.writing").mkdir()
    (tmp_path / "checkpoints/.global_step_1.removed").mkdir()
    store(tmp_path, 4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["global_step_1", "global_step_4"]


def test_what_another_process_still_writes_stays(tmp_path: Path) -> None:
    written = tmp_path / "checkpoints/.global_step_2.writing"
    written.mkdir(parents=True)
    folder = os.open(written, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    store(tmp_path, 4)
    assert written.is_dir()
    os.close(folder)
    store(tmp_path, 5)
    assert not written.exists(), "once it has died"


def test_leftovers_go_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS, which has none of folders: else no run could save the step again at which another was killed."""
    killed = tmp_path / "run/checkpoints/.global_step_4.writing"
    killed.mkdir(parents=True)

    def without(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", without)
    assert remove_torn(tmp_path) == [], "another run may be writing it"
    store(tmp_path / "run", 4)
    assert steps(tmp_path / "run") == [4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 3, "polic', "Unterminated string"),
        ("", "Expecting value"),
        ('{"step": 3}', "it has no 'sha256'"),
        ('{"step": 3, "policy_version": 3, "files": {}}', "it has no 'sha256'"),
        ('{"step": 3, "policy_version": 3, "files": {}, "sha256": "0"}', "is not what was saved"),
        ('{"step": 3, "policy_version": 3, "files": {"a": 1}, "sha256": "0"}', "must be a mapping"),
        ("[1, 2]", "'list'|list indices|pop expected|cannot be interpreted"),
        ('{"step": 3, "policy_version": 3}', "has no checksums: it is of an earlier version.*export it"),
    ],
)
def test_a_torn_state_is_refused(tmp_path: Path, text: str, message: str) -> None:
    directory = store(tmp_path, 3)
    (directory / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE}: .*{message}"):
        read_state(directory)


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_state(tmp_path)


def test_a_failed_deletion_does_not_leave_half_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill in the middle of it: the files are still there, the name is gone."""
    store(tmp_path, 1)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt(path)

    directory = checkpoint_dir(tmp_path, 2)
    scratch = begin(directory)
    monkeypatch.setattr(shutil, "rmtree", killed)
    seal(scratch, RunState(step=2, policy_version=2))
    with pytest.raises(KeyboardInterrupt):
        publish(scratch, directory, max_keep=1)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("step", [2, 3], ids=["beyond max_keep", "saved again"])
def test_a_checkpoint_that_is_being_deleted_is_left_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Another run of the experiment starts just then."""
    for before in (1, 2, 3)[: step + 1]:
        store(tmp_path / "run", before)
    removed: list[Path] = []

    def meanwhile(path: Path) -> None:
        assert path.is_dir()
        removed.extend(remove_torn(tmp_path))
        shutil.rmtree(path)

    monkeypatch.setattr("embodied_rl.checkpoints.store.remove", meanwhile)
    store(tmp_path / "run", step, max_keep=1, content="newer")
    assert removed == []
    assert (checkpoint_dir(tmp_path / "run", step) / ACTOR).read_text() == "newer"


def test_a_step_that_is_saved_again_is_there_while_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = store(tmp_path, 3)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("embodied_rl.checkpoints.store.remove", killed)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path, 3, content="newer")
    assert (directory / ACTOR).read_text() == "newer"


@pytest.mark.parametrize("before", [(os, "open"), (fcntl, "flock")], ids=["open", "flock"])
def test_a_folder_that_was_taken_for_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[object, str]
) -> None:
    call, taken = getattr(*before), []

    def late(*arguments: object, **options: object) -> object:
        if not taken and (there := list((tmp_path / "checkpoints").glob(".*"))):
            taken.extend(there)
            shutil.rmtree(taken[0])
        return call(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(*before, late)
        scratch = begin(checkpoint_dir(tmp_path, 3))
    assert taken == [scratch] and scratch.is_dir()


def test_a_checkpoint_that_somebody_holds_is_deleted_all_the_same(tmp_path: Path) -> None:
    """As the process that made it does, which has ended its run and lives on."""
    store(tmp_path, 1)
    held = _held.pop()
    store(tmp_path, 2, max_keep=1)
    os.close(held)
    assert steps(tmp_path) == [2]


def test_later_checkpoints_are_those_of_later_steps_whatever_this_one_is_called(tmp_path: Path) -> None:
    checkpoints = [store(tmp_path, step) for step in (1, 2, 3)]
    assert later_checkpoints(checkpoints[0]) == checkpoints[1:]
    former = set_aside(checkpoints[1], "former")
    assert later_checkpoints(former) == checkpoints[2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "got step -1, policy_version 3; use another checkpoint"),
        ({"step": 3.5}, "got step 3.5"),
        ({"step": True}, "got step True"),
        ({"step": 4}, "is not what was saved"),
    ],
)
def test_a_step_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = store(tmp_path, 3) / STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_state(path.parent)


def test_a_checkpoint_under_another_s_name_is_refused(tmp_path: Path) -> None:
    renamed = store(tmp_path, 3).rename(checkpoint_dir(tmp_path, 4))
    with pytest.raises(CheckpointError, match="is of step 3, not 4; give it its name back"):
        read_state(renamed)


def test_a_state_of_endless_nesting_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path, 3) / STATE_FILE
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(path.parent)


def test_a_link_to_nowhere_makes_room(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    checkpoint_dir(tmp_path, 3).symlink_to(tmp_path / "gone")
    assert steps(tmp_path) == []
    store(tmp_path, 3)
    assert steps(tmp_path) == [3]
