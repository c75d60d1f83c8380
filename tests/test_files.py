from __future__ import annotations

import errno
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.files import Scratch, atomic, locked, set_aside, write_json, write_text


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "below/file.txt"
    with atomic(path) as scratch:
        scratch.write_text("text")
        assert not path.exists()
    assert path.read_text() == "text"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_takes_the_place_of_an_empty_one_and_of_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".folder.writing").mkdir()
    (tmp_path / ".folder.writing/left").touch()
    with atomic(tmp_path / "folder") as scratch:
        scratch.mkdir()
        (scratch / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "new"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def interrupted() -> None:
        with atomic(path, shared=shared) as scratch:
            scratch.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    for content in ("first", "second", "third"):
        path.write_text(content)
        set_aside(path, "former")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"former_notes": "first", "former_notes_1": "second", "former_notes_2": "third"}


@pytest.mark.parametrize("wait", [True, False])
def test_a_file_system_without_locks_has_none_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    refused = [errno.ENOSYS, errno.ENOLCK, errno.EIO]

    def flock(file: object, operation: int) -> None:
        raise OSError(refused.pop(0), "no such thing")

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        with locked(tmp_path / "lock", wait=wait):
            pass
    with pytest.raises(OSError, match="no such thing"), locked(tmp_path / "lock", wait=wait):
        pass
    assert refused == []


def test_where_there_are_no_locks_nobodys_folder_is_taken_for_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no such thing")

    monkeypatch.setattr("fcntl.flock", flock)
    first = Scratch("run-", within=str(tmp_path))
    Scratch("run-", within=str(tmp_path)).close()
    assert first.path.is_dir()


def test_json_has_no_word_for_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file.json", {"value": math.nan})
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "file.json", {"value": math.nan, "name": "é"}, allow_nan=True)
    assert (tmp_path / "file.json").read_text(encoding="utf-8") == '{\n  "value": NaN,\n  "name": "é"\n}\n'


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next_and_none_that_is_in_use(tmp_path: Path) -> None:
    code = (
        "import os, signal; from embodied_rl.files import Scratch; folder = Scratch('run-', os.sys.argv[1])\n"
        "(folder.path / 'socket').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    mine = Scratch("run-", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "run-of-somebody-else").mkdir()
    next_one = Scratch("run-", str(tmp_path))
    assert set(tmp_path.iterdir()) == {mine.path, next_one.path, tmp_path / "run-of-somebody-else"}
    mine.close()
    next_one.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run-of-somebody-else"]
