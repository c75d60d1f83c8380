"""The rooms of the house: who may import whom, and which modules answer before anything heavy is imported."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "embodied_rl"

LAYERS: Final = (
    ("errors",),
    ("extras", "files", "params", "registry", "seeding"),
    ("schema",),
    ("contracts",),
    ("algorithms",),
    ("channel",),
    ("runtime",),
    ("monitoring",),
    ("plan",),
    ("envs", "models"),
    ("evaluation",),
    ("language", "demonstrations"),
    ("training",),
    ("checkpoints",),
    ("workers",),
    ("tasks",),
    ("elsewhere",),
    ("composition",),
    ("command_line",),
    ("report",),
    ("launch",),
    ("commands",),
    ("explain",),
    ("cli", "api", "gymnasium_envs", "sb3"),
    ("envhub",),
    ("__main__",),
)
"""The one list of allowed arrows: a room imports rooms of earlier layers alone."""

EXCEPTIONS: Final[dict[tuple[str, str], str]] = {}
"""(importing file, imported room) -> why it may all the same. An arrow that is gone must be taken out."""

ANYWHERE: Final = ("__version__", "config")
"""Names of the package itself."""

HEAVY: Final = ("torch", "transformers", "matplotlib", "mujoco", "robosuite", "libero", "tensorboard", "wandb")
"""Seconds each to import."""

LIGHT: Final = (
    "embodied_rl",
    "embodied_rl.algorithms.catalog",
    "embodied_rl.channel.base",
    "embodied_rl.checkpoints.resume",
    "embodied_rl.checkpoints.store",
    "embodied_rl.cli",
    "embodied_rl.commands",
    "embodied_rl.commands.help",
    "embodied_rl.commands.terminal",
    "embodied_rl.demonstrations.fit",
    "embodied_rl.envs.base",
    "embodied_rl.errors",
    "embodied_rl.evaluation.comparison",
    "embodied_rl.evaluation.eval_file",
    "embodied_rl.explain.show",
    "embodied_rl.files",
    "embodied_rl.language.datasets.registry",
    "embodied_rl.language.rewards.functions",
    "embodied_rl.language.rewards.scoring",
    "embodied_rl.models.registry",
    "embodied_rl.models.weights.look",
    "embodied_rl.models.weights.shipped",
    "embodied_rl.params",
    "embodied_rl.registry",
    "embodied_rl.report.facts",
    "embodied_rl.runtime.placement",
    "embodied_rl.runtime.process_worker",
    "embodied_rl.runtime.worker",
    "embodied_rl.schema",
    "embodied_rl.seeding",
    "embodied_rl.tasks.validation",
)
"""What answers ``--help`` or a typo, or runs before a worker has set its threads; and every ``rules.py``."""


@dataclass(frozen=True, slots=True)
class Arrow:
    file: str
    line: int
    source: str
    target: str


def modules() -> Iterator[tuple[Path, str]]:
    """Each product file, and its room."""
    for entry in sorted(PACKAGE.iterdir()):
        if entry.name in ("config", "__pycache__", "__init__.py"):
            continue
        room = entry.resolve()  # envs and models are links
        if entry.suffix == ".py":
            yield room, entry.stem
        elif room.is_dir():
            for file in sorted(room.rglob("*.py")):
                yield file, entry.name


def arrows() -> list[Arrow]:
    """All imports between rooms, those in functions and under ``TYPE_CHECKING`` included."""
    found = []
    for file, source in modules():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: a relative import"
                whole = node.module == "embodied_rl"
                names = [f"embodied_rl.{alias.name}" for alias in node.names] if whole else [node.module or ""]
            for name in names:
                package, _, rest = name.partition(".")
                target = rest.partition(".")[0]
                if package == "embodied_rl" and target not in (source, *ANYWHERE):
                    found.append(Arrow(str(file.relative_to(ROOT)), node.lineno, source, target))  # type: ignore[attr-defined]
    return found


ARROWS: Final = arrows()
LEVEL: Final = {room: level for level, layer in enumerate(LAYERS) for room in layer}


def test_every_room_is_in_the_list() -> None:
    assert {room for _, room in modules()} <= LEVEL.keys()


def test_rooms_import_lower_rooms_alone() -> None:
    forbidden = [
        f"{a.file}:{a.line}: {a.source} imports {a.target}"
        for a in ARROWS
        if LEVEL[a.target] >= LEVEL[a.source] and (a.file, a.target) not in EXCEPTIONS
    ]
    assert not forbidden, "\n".join(["arrows that LAYERS does not allow:", *forbidden])


def test_exceptions_are_needed() -> None:
    assert EXCEPTIONS.keys() <= {(a.file, a.target) for a in ARROWS if LEVEL[a.target] >= LEVEL[a.source]}


def test_rooms_form_no_circle() -> None:
    """Not even by way of the exceptions."""
    graph: dict[str, set[str]] = {}
    for arrow in ARROWS:
        graph.setdefault(arrow.source, set()).add(arrow.target)
    list(graphlib.TopologicalSorter(graph).static_order())


def test_light_modules_import_nothing_heavy() -> None:
    rules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file, _ in modules() if file.stem == "rules"]
    code = (
        f"HEAVY = {HEAVY!r}"
        + """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if heavy := [module for module in HEAVY if module in sys.modules]:
        sys.exit(f"{name} imports {', '.join(heavy)}")
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT, *rules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LIGHT)
def test_the_list_names_modules(name: str) -> None:
    path = ROOT.joinpath(*name.split("."))
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
