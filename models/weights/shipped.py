"""Folders of weights that need no download.

=====================  ===============================================================================
in a configuration     is the folder
=====================  ===============================================================================
``${shipped:name}``    ``models/shipped/<name>``, which comes with the project
``${packaged:name}``   of the user's cache; weights that another package carries, unpacked on first use
=====================  ===============================================================================
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from omegaconf import OmegaConf

from embodied_rl.errors import UserError
from embodied_rl.registry import load_function

SHIPPED: Final = Path(__file__).parents[1] / "shipped"
PACKAGED: Mapping[str, str] = {"smollm2_135m": "embodied_rl.models.weights.smollm2:unpack"}
"""Name -> "module:function" that writes the folder it is given. It prints what it does, and may raise UserError."""


def cached(name: str) -> Path:
    """The folder of a packaged model: below ``$XDG_CACHE_HOME``, or else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "embodied_rl", name)


def provide(path: str | None) -> None:
    """Write the folder ``path`` if it is a packaged model's and is not there yet; it appears when it is whole.

    Raises:
        UserError: a package is missing, or the folder cannot be written.
    """
    name = next((name for name in PACKAGED if path is not None and Path(path) == cached(name)), None)
    if name is None or cached(name).exists():
        return
    folder, unpack = cached(name), load_function("packaged model", PACKAGED, name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            unpack(scratch)
            scratch.chmod(0o755)
            with contextlib.suppress(OSError):  # another run was faster, and its folder is the same
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written: {error}; make room, or set XDG_CACHE_HOME to another folder"
        ) from error


def register_resolvers() -> None:
    """Let configurations name these folders."""
    OmegaConf.register_new_resolver("shipped", lambda name: str(SHIPPED / name), replace=True)
    OmegaConf.register_new_resolver("packaged", lambda name: str(cached(name)), replace=True)
