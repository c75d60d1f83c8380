"""Checksums of a checkpoint's files, and what else may lie among them. No torch here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_KINDS: Final = (".safetensors", ".json")
"""All that a checkpoint consists of; neither can hold code."""
_FORMER: Final = (".metadata", ".distcp")
"""Ends of names in checkpoints of former versions, which are pickles."""
_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """A file as it was saved."""

    bytes: int
    sha256: str
    """In hexadecimal digits."""


def sums(directory: Path, *, without: str) -> dict[str, FileSum]:
    """Path relative to ``directory`` -> sum, of all files but ``without``. Files are read side by side."""
    paths = sorted(path for path in _files(directory) if path != without)
    with ThreadPoolExecutor(_threads()) as pool:
        return dict(zip(paths, pool.map(lambda path: _sum(directory / path), paths), strict=True))


def strangers(directory: Path) -> list[str]:
    """Files of a kind that no checkpoint has, relative to ``directory``; nothing is opened."""
    return sorted(path for path in _files(directory) if not path.endswith(_KINDS))


def is_former(name: str) -> bool:
    """Whether a stranger is part of a checkpoint of a former version."""
    return name.endswith(_FORMER)


def differences(directory: Path, saved: Mapping[str, FileSum], *, without: str) -> list[str]:
    """How the files of ``directory`` but ``without`` differ from those that were saved, a line each."""
    here = {path for path in _files(directory) if path != without}
    found = [f"{path} is missing" for path in saved.keys() - here]
    found += [f"{path} was not saved with it: remove it" for path in here - saved.keys()]
    whole: list[str] = []
    for path in sorted(saved.keys() & here):
        size = (directory / path).stat().st_size
        if size == saved[path].bytes:
            whole.append(path)
        else:
            found.append(f"{path} has {size} bytes, {saved[path].bytes} were saved")
    with ThreadPoolExecutor(_threads()) as pool:
        now = pool.map(lambda path: _sum(directory / path), whole)
        found += [
            f"{path} is not what was saved (another SHA-256)"
            for path, value in zip(whole, now, strict=True)
            if value != saved[path]
        ]
    return sorted(found)


def _files(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(directory).as_posix()


def _sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(bytes=file.tell(), sha256=digest.hexdigest())


def _threads() -> int:
    """A thread hashes a gibibyte in about a second; more than a few files are rarely worth more."""
    return min(_THREADS, os.cpu_count() or 1)
