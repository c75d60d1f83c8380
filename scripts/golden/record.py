"""What the scripts beside this file share: where upstream's code is from, and how results are stored."""

from __future__ import annotations

import datetime
import importlib.machinery
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from safetensors.numpy import save_file

TESTS = Path(__file__).resolve().parents[2] / "tests/models"


class StandIn:
    """An import hook: packages that upstream's files import and none of the functions run here uses."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a stand-in has no code."""


def checkout(folder: Path, repository: str) -> dict[str, str]:
    """Repository and commit of an unchanged git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout

    if changes := git("status", "--porcelain", "--untracked-files=no").strip():
        raise SystemExit(f"{folder} is not as committed upstream:\n{changes}")
    return {"repository": repository, "commit": git("rev-parse", "HEAD").strip()}


def write(
    folder: Path,
    name: str,
    sources: Sequence[Mapping[str, str]],
    packages: Sequence[str],
    facts: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> None:
    """``<name>.json`` with the sources and what is exact, ``<name>.safetensors`` with arrays."""
    made = {
        "sources": list(sources),
        "python": platform.python_version(),
        "packages": {package: importlib.metadata.version(package) for package in packages},
        "date": datetime.date.today().isoformat(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"made": made, **facts}, indent=1, sort_keys=True)
    (folder / f"{name}.json").write_text(_compact(content) + "\n")
    arrays = {key: np.ascontiguousarray(value) for key, value in sorted(tensors.items())}
    save_file(arrays, folder / f"{name}.safetensors")
    (folder / f"{name}.safetensors").chmod(0o644)
    for path in sorted(folder.glob(f"{name}.*")):
        print(f"{path}: {path.stat().st_size} bytes")


def folded(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    """Name -> [how many, shape], with ``*`` for the numbers of layers: tensors of equal name and shape are one line."""
    lines: dict[str, list[Any]] = {}
    for name, shape in shapes.items():
        key = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        count, known = lines.get(key, [0, list(shape)])
        if known != list(shape):
            raise ValueError(f"{name}: {list(shape)} where others have {known}")
        lines[key] = [count + 1, known]
    return lines


def _compact(text: str) -> str:
    """Lists of plain values on one line."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
