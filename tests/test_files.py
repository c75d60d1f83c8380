from __future__ import annotations

import math
from pathlib import Path

import pytest

from embodied_rl.files import atomic, write_json, write_text


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


def test_json_has_no_word_for_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file.json", {"value": math.nan})
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "file.json", {"value": math.nan, "name": "é"}, allow_nan=True)
    assert (tmp_path / "file.json").read_text(encoding="utf-8") == '{\n  "value": NaN,\n  "name": "é"\n}\n'
