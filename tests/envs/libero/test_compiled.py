from __future__ import annotations

import logging
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.envs.libero import compiled
from embodied_rl.envs.libero.compiled import model_of
from embodied_rl.files import locked

mujoco: Any = pytest.importorskip("mujoco")


def scene(tmp_path: Path, extra: str = "") -> str:
    """A model with a texture of 49 kB, a mesh of about 100 kB from a file, and a small mesh."""
    steps = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    rings = [(np.cos(a) * np.sin(b), np.sin(a) * np.sin(b), np.cos(b)) for b in np.linspace(0.1, 3, 30) for a in steps]
    faces = [(r * 40 + c, r * 40 + (c + 1) % 40, (r + 1) * 40 + c) for r in range(29) for c in range(40)]
    lines = [f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in rings]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in faces]
    if not (tmp_path / "bowl.obj").exists():
        (tmp_path / "bowl.obj").write_text("\n".join(lines))
    return f"""<mujoco><asset>
        <texture name="chess" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="128" height="128"/>
        <material name="chess" texture="chess"/><mesh name="bowl" file="{tmp_path}/bowl.obj"/>
        <mesh name="wedge" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>
        <worldbody><geom type="plane" size="1 1 1" material="chess"/><body pos="0 0 2"><freejoint/>
        <geom type="mesh" mesh="bowl"/><geom type="mesh" mesh="wedge"/></body>{extra}</worldbody></mujoco>"""


def contents(model: Any) -> bytes:
    whole = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, whole)
    return whole.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def compile_count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by what is compiled."""
    compile_, seen = mujoco.MjModel.from_xml_string, []

    class Counting:
        from_binary_path = staticmethod(mujoco.MjModel.from_binary_path)

        @staticmethod
        def from_xml_string(xml: str) -> Any:
            seen.append(xml)
            return compile_(xml)

    monkeypatch.setattr(mujoco, "MjModel", Counting)
    return seen


def test_a_model_comes_back_to_the_last_bit(tmp_path: Path, folder: Path, compile_count: list[str]) -> None:
    xml = scene(tmp_path)
    plain = contents(mujoco.MjModel.from_xml_string(xml))
    left, found = model_of(xml, folder), model_of(xml, folder)
    assert len(compile_count) == 2
    assert contents(left) == plain, "and is as it was after it has been left there"
    assert contents(found) == plain


def test_scenes_share_what_they_have_in_common(tmp_path: Path, folder: Path) -> None:
    model_of(scene(tmp_path), folder)
    first = set(folder.iterdir())
    other = scene(tmp_path, '<geom type="box" size="1 1 1"/>')
    model_of(other, folder)
    assert sorted(path.suffix for path in first) == ["", "", ".index", ".mjb"]  # texture, bowl
    assert sorted(path.suffix for path in set(folder.iterdir()) - first) == [".index", ".mjb"]
    assert contents(model_of(other, folder)) == contents(mujoco.MjModel.from_xml_string(other))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [flip, cut, empty])
@pytest.mark.parametrize("kind", [".index", ".mjb", ""])
def test_what_is_damaged_is_made_again(
    tmp_path: Path,
    folder: Path,
    compile_count: list[str],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    harm: Callable[[Path], None],
) -> None:
    xml = scene(tmp_path)
    plain = contents(model_of(xml, folder))
    for path in [path for path in folder.iterdir() if path.suffix == kind]:
        harm(path)
    for _ in range(4):  # One damaged piece is found at a time.
        assert contents(model_of(xml, folder)) == plain
    assert "damaged, so the scene is compiled again" in caplog.text
    before = len(compile_count)
    assert contents(model_of(xml, folder)) == plain
    assert len(compile_count) == before, "the files are whole again"


def test_a_missing_file_is_made_again(tmp_path: Path, folder: Path, compile_count: list[str]) -> None:
    xml = scene(tmp_path)
    plain = contents(model_of(xml, folder))
    for path in list(folder.iterdir()):
        path.unlink()
        assert contents(model_of(xml, folder)) == plain
    assert len(compile_count) == 5
    assert len(list(folder.iterdir())) == 4


def test_a_trunk_that_goes_while_it_is_read_is_made_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process found damage, or somebody cleared the folder."""
    xml = scene(tmp_path)
    plain = contents(model_of(xml, folder))
    checksum_of, removed = compiled._checksum, []

    def remove_after(path: Path) -> int:
        checksum = checksum_of(path)
        if not removed:
            path.unlink()
            removed.append(path)
        return checksum

    monkeypatch.setattr(compiled, "_checksum", remove_after)
    assert contents(model_of(xml, folder)) == plain
    assert removed
    assert removed[0].exists()


def test_saving_takes_the_memory_of_one_more_model(tmp_path: Path, folder: Path) -> None:
    textures = "".join(
        f'<texture name="t{n}" type="2d" builtin="flat" rgb1="1 {n / 8} 0" width="256" height="256"/>' for n in range(8)
    )
    model = mujoco.MjModel.from_xml_string(scene(tmp_path).replace("<asset>", f"<asset>{textures}"))
    folder.mkdir()
    piece, size = 256 * 256 * 3, mujoco.mj_sizeModel(model)
    assert size > 8 * piece
    tracemalloc.start()
    try:
        compiled._save(model, folder, "0")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size <= most < size + 2 * piece


def test_who_comes_second_waits_for_the_first(
    tmp_path: Path, folder: Path, compile_count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    xml = scene(tmp_path)
    load, save, missed = compiled._load, compiled._save, threading.Event()
    second: list[Any] = []
    other = threading.Thread(target=lambda: second.append(model_of(xml, folder)), daemon=True)

    def see_miss(*where: Any) -> Any:
        try:
            return load(*where)
        finally:
            if threading.current_thread() is other:
                missed.set()

    def save_once_missed(*what: Any) -> None:
        if threading.current_thread() is not other:
            other.start()
            assert missed.wait(10)
        save(*what)

    monkeypatch.setattr(compiled, "_load", see_miss)
    monkeypatch.setattr(compiled, "_save", save_once_missed)
    first = model_of(xml, folder)
    other.join(10)
    assert contents(second[0]) == contents(first)
    assert len(compile_count) == 1
    assert not [path for path in folder.iterdir() if path.name.endswith(".lock")]


def test_who_waits_too_long_compiles_and_keeps_nothing(
    tmp_path: Path, folder: Path, compile_count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    xml = scene(tmp_path)
    monkeypatch.setattr(compiled, "_PATIENCE", 0.0)
    lock = folder / f".{compiled._key(xml)}.lock"
    with locked(lock):
        lock.parent.chmod(0o700)
        assert model_of(xml, folder).nmesh == 2
        assert list(folder.iterdir()) == [lock]
    assert len(compile_count) == 1


@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_a_piece_harmed_while_the_scene_is_saved_is_survived(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    """The scene is cut into pieces, and put together from the files."""
    xml = scene(tmp_path)
    write = compiled._write

    def harm_after(*what: Any) -> None:
        write(*what)
        harm(next(path for path in folder.iterdir() if not path.suffix))

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_write", harm_after)
        assert contents(model_of(xml, folder)) == contents(mujoco.MjModel.from_xml_string(xml))
    assert contents(model_of(xml, folder)) == contents(mujoco.MjModel.from_xml_string(xml))


def test_a_scene_that_cannot_be_written_whole_is_used(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xml = scene(tmp_path)

    def no_room(*what: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(compiled, "_write", no_room)
    assert contents(model_of(xml, folder)) == contents(mujoco.MjModel.from_xml_string(xml))
    assert "no space left" in caplog.text


def test_a_changed_asset_is_another_scene(tmp_path: Path, folder: Path) -> None:
    xml = scene(tmp_path)
    before = model_of(xml, folder)
    bowl = tmp_path / "bowl.obj"
    bowl.write_text(bowl.read_text().replace("v 0.09", "v 0.08"))
    os.utime(bowl, ns=(1, 1))
    after = model_of(xml, folder)
    assert contents(after) == contents(mujoco.MjModel.from_xml_string(xml))
    assert contents(after) != contents(before)


def test_a_model_of_files_by_relative_names_is_not_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another directory could have others of these names."""
    xml = scene(tmp_path).replace(f"{tmp_path}/", "")
    monkeypatch.chdir(tmp_path)
    assert model_of(xml, folder).nmesh == 2
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, folder: Path, compile_count: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    xml = scene(tmp_path)
    model_of(xml, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    model_of(xml, folder)
    assert len(compile_count) == 2
    assert f"{folder}: others can write there" in caplog.text


def test_a_folder_of_somebody_else_is_called_that(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert model_of(scene(tmp_path), folder).nmesh == 2
    assert f"{folder}: it belongs to user {owner}, not {owner + 1}" in caplog.text
    assert "others can write" not in caplog.text
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_said_and_survived(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_SPARE", 1 << 60)
    with caplog.at_level(logging.WARNING):
        assert model_of(scene(tmp_path), folder).nmesh == 2
    assert "the disk is almost full" in caplog.text
    assert list(folder.iterdir()) == []


def age(folder: Path) -> None:
    """Two months without use."""
    then = time.time() - 60 * 24 * 3600
    for path in folder.iterdir():
        os.utime(path, (then, then))


def test_what_is_not_used_for_long_goes_when_a_scene_is_saved(
    tmp_path: Path, folder: Path, compile_count: list[str]
) -> None:
    used, unused, new = (scene(tmp_path, f'<geom type="sphere" size="{size}"/>') for size in (1, 2, 3))
    model_of(used, folder)
    model_of(unused, folder)
    (folder / "notes").write_text("somebody's")
    (folder / f".{'0' * 64}.node.1.writing").write_text("left by a killed process")
    age(folder)
    model_of(used, folder)
    model_of(new, folder)
    names = {path.name for path in folder.iterdir()}
    assert {f"{compiled._key(xml)}{suffix}" for xml in (used, new) for suffix in (".mjb", ".index")} < names
    assert len(names) == 4 + 2 + 1, "with texture, bowl and notes"
    before = len(compile_count)
    assert contents(model_of(used, folder)) == contents(mujoco.MjModel.from_xml_string(used))
    assert len(compile_count) == before + 1, "by the test itself"


def test_pieces_that_a_new_scene_shares_count_as_used(tmp_path: Path, folder: Path, compile_count: list[str]) -> None:
    old, new = (scene(tmp_path, f'<geom type="sphere" size="{size}"/>') for size in (1, 2))
    model_of(old, folder)
    age(folder)
    model_of(new, folder)
    model_of(new, folder)
    assert len(compile_count) == 2
    assert len(list(folder.iterdir())) == 4


def test_zeros_take_no_room(tmp_path: Path, folder: Path) -> None:
    model_of(scene(tmp_path, '<geom type="sphere" size="1"/>' * 3), folder)
    trunk = next(folder.glob("*.mjb"))
    assert trunk.stat().st_blocks * 512 < trunk.stat().st_size


def test_the_folder_follows_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.user_cache() == tmp_path / "embodied_rl" / "libero"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled.user_cache() == tmp_path / "home" / ".cache" / "embodied_rl" / "libero"


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As a container's whose number no user has."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    assert compiled.user_cache() is None
    assert "set HOME or XDG_CACHE_HOME" in caplog.text
