"""Compiled scenes on disk: decoding textures and processing meshes takes seconds, reading them again a part of one.

The *trunk* is a scene's model in MuJoCo's binary format, in which textures and large meshes are left zero. These are
*pieces*, files named by their contents: robot, walls and objects that scenes have in common are stored once. Nothing
is executed on loading, everything is checked first, and what is damaged is removed and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from embodied_rl.files import atomic, locked

log = logging.getLogger(__name__)

_FORMAT: Final = 1
_SMALLEST_PIECE: Final = 1 << 14
_BLOCK: Final = 1 << 16
"""Bytes; blocks of zeros take no room on disk."""
_SPARE: Final = 4 << 30
"""Bytes that stay free on the disk."""
_PATIENCE: Final = 60.0
"""Seconds to wait for another process that compiles the same scene."""
_UNUSED: Final = 30 * 24 * 3600.0
"""Seconds after which a file that nothing has read is removed."""
_PER_MESH: Final = (
    ("mesh_vertadr", "mesh_vertnum", ("mesh_vert",)),
    ("mesh_normaladr", "mesh_normalnum", ("mesh_normal",)),
    ("mesh_texcoordadr", "mesh_texcoordnum", ("mesh_texcoord",)),
    ("mesh_faceadr", "mesh_facenum", ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")),
    ("mesh_bvhadr", "mesh_bvhnum", ("bvh_child", "bvh_depth", "bvh_nodeid", "bvh_aabb")),
)
"""First row, number of rows, arrays."""

Slice = tuple[str, int, int]
"""An array of the model, first row and the row after the last."""


class _DamagedError(Exception):
    """A file is not what was written."""


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/embodied_rl/libero``, by default below ``~/.cache``; None for a user who has no home."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        log.warning("no compiled scenes are kept (%s): set HOME or XDG_CACHE_HOME", error)
        return None
    return caches / "embodied_rl" / "libero"


@contextlib.contextmanager
def kept_models(folder: Path | None) -> Iterator[None]:
    """While this lasts, robosuite takes models from ``folder`` where they are, and leaves those that it compiles there.
    None: it compiles as ever."""
    from robosuite.utils.binding_utils import MjSim

    own = MjSim.__dict__["from_xml_string"]
    if folder is not None:
        MjSim.from_xml_string = classmethod(lambda cls, xml: cls(model_of(xml, folder)))  # type: ignore[assignment]
    try:
        yield
    finally:
        MjSim.from_xml_string = own


def model_of(xml: str, folder: Path) -> Any:
    """MuJoCo's model of ``xml``, from ``folder`` if it is there, else compiled and left there."""
    import mujoco

    compile_ = mujoco.MjModel.from_xml_string  # type: ignore[attr-defined]
    key = _key(xml) if _is_ours(folder) else None
    if key is None:
        return compile_(xml)
    if (found := _found(folder, key)) is not None:
        return found
    with _turn(folder, key) as ours:
        if ours and (found := _found(folder, key)) is not None:
            return found
        model = compile_(xml)
        if ours:
            try:
                _save(model, folder, key)
            except OSError as error:
                log.warning("cannot keep a compiled scene in %s (%s): the next start compiles it again", folder, error)
            except _DamagedError as error:
                log.warning("%s: damaged or removed, so the scene is compiled again", error)
                model = compile_(xml)
    return model


def _found(folder: Path, key: str) -> Any:
    """None if it is not there, or not to be read."""
    try:
        return _load(folder, key)
    except (OSError, ValueError):  # MuJoCo's for a file that has been removed meanwhile is a ValueError.
        return None
    except _DamagedError as error:
        log.warning("%s: damaged, so the scene is compiled again", error)
        return None


@contextlib.contextmanager
def _turn(folder: Path, key: str) -> Iterator[bool]:
    """While this lasts, others wait instead of compiling the same scene. False: one who has the turn takes too long."""
    lock, until = folder / f".{key}.lock", time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as held:
        ours = False
        while not ours:
            try:
                held.enter_context(locked(lock, wait=False))
                ours = True
            except BlockingIOError:
                if time.monotonic() > until:
                    break
                time.sleep(0.1)
            except OSError:
                ours = True  # A file system without locks: several may compile it, and the last one's files stay.
        try:
            yield ours
        finally:
            if ours:  # One who has opened it already finds the scene, or compiles it beside another.
                with contextlib.suppress(OSError):
                    lock.unlink()


def _key(xml: str) -> str | None:
    """Of all that a compiled model depends on; None where that cannot be told."""
    import mujoco

    files = []
    for name in sorted(set(re.findall(r'\bfile\w*="([^"]*)"', xml))):
        if not os.path.isabs(name) or not os.path.isfile(name):
            return None
        status = os.stat(name)
        files.append((name, status.st_size, status.st_mtime_ns))
    parts = (_FORMAT, mujoco.__version__, platform.machine(), xml, files)  # type: ignore[attr-defined]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _is_ours(folder: Path) -> bool:
    """Make the folder; nobody else may write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        log.warning("no compiled scenes are kept: %s", error)
        return False
    if status.st_uid != os.getuid():
        wrong, remedy = (
            f"it belongs to user {status.st_uid}, not {os.getuid()}",
            "set XDG_CACHE_HOME to your own folder",
        )
    elif status.st_mode & 0o022:
        wrong, remedy = "others can write there", "run chmod go-w on it"
    else:
        return True
    log.warning("%s: %s, so compiled scenes are neither read from it nor kept in it: %s", folder, wrong, remedy)
    return False


def _load(folder: Path, key: str) -> Any:
    import mujoco

    index, trunk = folder / f"{key}.index", folder / f"{key}.mjb"
    checksum, _, contents = index.read_bytes().partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(contents):
        raise _damaged(index)
    trunk_sum, pieces = json.loads(contents)
    if _checksum(trunk) != trunk_sum:
        raise _damaged(trunk, index)
    model = mujoco.MjModel.from_binary_path(str(trunk))  # type: ignore[attr-defined]
    _fill(model, folder, pieces)
    for name in (index.name, trunk.name, *(name for name, *_ in pieces)):
        with contextlib.suppress(OSError):
            os.utime(folder / name)
    return model


def _fill(model: Any, folder: Path, pieces: list[tuple[str, int, list[Slice]]]) -> None:
    """Pieces, by name, checksum and place, into a trunk."""
    for name, checksum, slices in pieces:
        views = _views(model, slices)
        data = np.fromfile(folder / name, dtype=np.uint8)
        if len(data) != sum(view.nbytes for view in views) or zlib.crc32(data.data) != checksum:
            raise _damaged(folder / name)
        start = 0
        for view in views:
            view.reshape(-1).view(np.uint8)[:] = data[start : start + view.nbytes]
            start += view.nbytes


def _views(model: Any, slices: list[Slice]) -> list[np.ndarray]:
    return [getattr(model, array)[start:stop] for array, start, stop in slices]


def _checksum(path: Path) -> int:
    """Of a file's blocks that are not zeros; holes are passed over."""
    checksum, position = 0, 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while position < size:
            try:
                position = os.lseek(file.fileno(), position, os.SEEK_DATA) // _BLOCK * _BLOCK
            except OSError:  # Nothing but a hole is left.
                break
            file.seek(position)
            block = file.read(_BLOCK)
            if block.count(0) < len(block):
                checksum = zlib.crc32(block, zlib.crc32(position.to_bytes(8, "little"), checksum))
            position += _BLOCK
    return zlib.crc32(size.to_bytes(8, "little"), checksum)


def _damaged(*paths: Path) -> _DamagedError:
    for path in paths:
        path.unlink(missing_ok=True)
    return _DamagedError(str(paths[0]))


def _save(model: Any, folder: Path, key: str) -> None:
    """Cuts the model into pieces, so that memory holds it and its trunk alone, and puts it together again. Removes
    what has not been read for long.

    Raises:
        OSError: it cannot be written.
        _DamagedError: it could not be put together again.
    """
    import mujoco

    if shutil.disk_usage(folder).free < _SPARE + mujoco.mj_sizeModel(model):  # type: ignore[attr-defined]
        raise OSError("the disk is almost full")
    pieces: list[tuple[str, int, list[Slice]]] = []
    try:
        for slices in _pieces(model):
            pieces.append(_cut(model, slices, folder))
        _write(model, pieces, folder, key)
    finally:
        try:
            _fill(model, folder, pieces)
        except OSError as error:
            raise _DamagedError(str(error)) from error
    _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if re.match(r"\.?[0-9a-f]{64}", path.name) and path.stat().st_mtime < time.time() - _UNUSED:
                path.unlink()


def _cut(model: Any, slices: list[Slice], folder: Path) -> tuple[str, int, list[Slice]]:
    """Write a piece, and leave zeros in its place."""
    views = _views(model, slices)
    data = np.concatenate([view.reshape(-1).view(np.uint8) for view in views])
    name = hashlib.sha256(data.data).hexdigest()
    try:
        os.utime(folder / name)
    except OSError:
        with atomic(folder / name, shared=True) as scratch:
            data.tofile(scratch)
    for view in views:
        view[:] = 0
    return name, zlib.crc32(data.data), slices


def _write(model: Any, pieces: list[tuple[str, int, list[Slice]]], folder: Path, key: str) -> None:
    """The trunk and its index."""
    import mujoco

    trunk = np.empty(mujoco.mj_sizeModel(model), np.uint8)  # type: ignore[attr-defined]
    mujoco.mj_saveModel(model, None, trunk)  # type: ignore[attr-defined]
    with atomic(folder / f"{key}.mjb", shared=True) as scratch, scratch.open("wb") as file:
        for start in range(0, len(trunk), _BLOCK):
            block = trunk[start : start + _BLOCK]
            if block.any():
                file.seek(start)
                file.write(block.data)
        file.truncate(len(trunk))
        file.flush()
        checksum = _checksum(scratch)
    with atomic(folder / f"{key}.index", shared=True) as scratch:
        contents = json.dumps((checksum, pieces)).encode()
        scratch.write_bytes(b"%08x\n%s" % (zlib.crc32(contents), contents))


def _pieces(model: Any) -> Iterator[list[Slice]]:
    """What scenes may have in common: each texture, and each mesh with all its arrays."""
    for start, width, height, channels in zip(
        model.tex_adr.tolist(),
        model.tex_width.tolist(),
        model.tex_height.tolist(),
        model.tex_nchannel.tolist(),
        strict=True,
    ):
        if width * height * channels >= _SMALLEST_PIECE:
            yield [("tex_data", start, start + width * height * channels)]
    for mesh in range(model.nmesh):
        slices = []
        for first, count, arrays in _PER_MESH:
            start, rows = int(getattr(model, first)[mesh]), int(getattr(model, count)[mesh])
            slices += [(array, start, start + rows) for array in arrays if rows > 0]
        if sum(getattr(model, array)[start:stop].nbytes for array, start, stop in slices) >= _SMALLEST_PIECE:
            yield slices
