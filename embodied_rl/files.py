"""Writing of files and folders that are whole under their name, whenever the process was killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_IN_USE: Final = ".in_use"
"""Name of the file that the process of a temporary folder has locked."""
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def hidden_neighbour(path: Path, suffix: str) -> Path:
    """``.name.suffix`` beside ``path``: on the same file system, and passed over by those who list its folder."""
    return path.with_name(f".{path.name}.{suffix}")


@contextlib.contextmanager
def atomic(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A hidden neighbour to write a file or folder to: renamed to ``path`` if the block succeeds, removed if not.

    Args:
        path: its parents are made; a file is replaced, and so is an empty folder by a folder.
        shared: several processes may write it at once, and the last one wins.
    """
    scratch = hidden_neighbour(path, f"{platform.node()}.{os.getpid()}.writing" if shared else "writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(scratch)  # of a process that was killed
    try:
        yield scratch
        scratch.replace(path)
    finally:
        remove(scratch)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True, needed: bool = False) -> Iterator[None]:
    """Hold a lock file, with the directories above it. The system lifts the lock when the process dies. A file system
    without locks has none to wait for.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is false.
        OSError: there are no locks, and one is ``needed``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if needed or error.errno not in _NO_LOCKS:
                raise
        yield


class Scratch:
    """A folder for temporary files. Where its process is killed, the next one with this prefix removes it.

    Args:
        prefix: of its name.
        within: the folder above it; None: that of the system for temporary files.
    """

    def __init__(self, prefix: str, within: str | None = None) -> None:
        for left in Path(within or tempfile.gettempdir()).glob(f"{prefix}*/{_IN_USE}"):
            with contextlib.suppress(OSError), locked(left, wait=False, needed=True):  # its process is gone
                shutil.rmtree(left.parent, ignore_errors=True)
        self._held = contextlib.ExitStack()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
            self._held.enter_context(locked(self.path / _IN_USE))
            if (self.path / _IN_USE).exists():  # nobody was before us with the lock, and took it for left behind
                return
            self._held.close()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def remove(path: Path) -> None:
    """Delete a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file or folder to ``<why>_<name>``, with a number where that is taken; returns its new path."""
    names = (path.with_name(f"{why}_{path.name}{f'_{n}' if n else ''}") for n in itertools.count())
    return path.rename(next(name for name in names if not name.exists()))


def write_text(path: Path, content: str) -> None:
    """Write a file in one atomic step, with the directories above it."""
    with atomic(path, shared=True) as scratch:
        write_synced(scratch, content.encode())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and return once the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def with_usual_mode(path: Path) -> Iterator[None]:
    """Let the block write a file by a library that would leave one that its owner alone can read: its mode obeys the
    umask."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def write_json(path: Path, content: Any, *, allow_nan: bool = False) -> None:
    """Write an indented JSON file in one atomic step, with the directories above it.

    Args:
        allow_nan: write ``NaN``, which Python reads and JSON has no word for.

    Raises:
        TypeError, ValueError: it holds something that JSON has no word for.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n")


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``, of a file that anybody may have written: nesting too deep for Python is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
