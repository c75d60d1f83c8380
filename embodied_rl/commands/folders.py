"""Folders that commands write: whole, or not there. No torch here."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from embodied_rl.errors import UserError


@contextlib.contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A hidden neighbour to write to; it becomes ``directory`` when the block ends well, and is removed when not.

    Raises:
        UserError: ``directory`` exists already, with something in it, or cannot be made.
    """
    refuse_existing(directory)
    scratch = directory.with_name(f".{directory.name}.writing")
    try:
        if scratch.exists():  # of a command that was killed
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
        yield scratch
        scratch.rename(directory)  # over an empty one, too
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(directory: Path) -> None:
    """Go on only if ``directory`` can be made.

    Raises:
        UserError: it exists already, with something in it.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise UserError(f"{directory}: exists already; give a folder that does not, or an empty one")
