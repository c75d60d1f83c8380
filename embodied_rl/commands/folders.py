"""Folders that commands write: whole, or not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.files import atomic


@contextlib.contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A hidden neighbour to write to; it becomes ``directory`` when the block ends well, and is removed when not.

    Raises:
        UserError: ``directory`` exists already, with something in it, or cannot be made.
    """
    refuse_existing(directory)
    try:
        with atomic(directory) as scratch:
            scratch.mkdir()
            yield scratch
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error}") from error


def refuse_existing(directory: Path) -> None:
    """Go on only if ``directory`` can be made.

    Raises:
        UserError: it exists already, with something in it.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise UserError(f"{directory}: exists already; give a folder that does not, or an empty one")
