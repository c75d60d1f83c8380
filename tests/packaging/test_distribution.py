"""What wheel and sdist hold: one top-level package, every module, every YAML file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", "embodied_rl", "envs", "models", "config")
DATA_SUFFIXES = (".py", ".yaml", ".typed", ".json", ".safetensors", ".md", ".j2")


def build(source: Path, target: str, destination: Path) -> Path:
    """Builds with the environment's own setuptools: no network."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{target}", "--outdir", str(destination)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = destination.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, symlinks kept: a build leaves its traces there and not in the working tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in PROJECT_FILES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def files_of_package(root: Path) -> set[str]:
    """Every module and data file below ``root/embodied_rl``, the symlinked folders included."""
    found: set[str] = set()
    for folder in (root / "embodied_rl", *(root / "embodied_rl" / name for name in ("envs", "models", "config"))):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix in DATA_SUFFIXES and "__pycache__" not in path.parts:
                found.add(path.relative_to(root).as_posix())
    return found


def test_wheel_has_one_top_level_package(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in files_of_wheel(wheel)}
    assert top_level == {"embodied_rl", "embodied_rl-0.2.0.dist-info"}


def test_wheel_holds_every_module_and_config_file(wheel: Path, checkout: Path) -> None:
    expected = files_of_package(checkout)
    assert {"embodied_rl/envs/base.py", "embodied_rl/models/base.py", "embodied_rl/config/train.yaml"} <= expected
    packed = {name for name in files_of_wheel(wheel) if name.startswith("embodied_rl/")}
    assert packed == expected


def test_wheel_from_sdist_equals_wheel_from_checkout(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert (unpacked / "embodied_rl" / "envs" / "base.py").is_file()
    rebuilt = build(unpacked, "wheel", tmp_path / "dist")
    assert files_of_wheel(rebuilt) == files_of_wheel(wheel)


def test_wheel_declares_the_console_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("embodied_rl-0.2.0.dist-info/entry_points.txt").decode()
    assert "embodied-rl = embodied_rl.cli:main" in entry_points
