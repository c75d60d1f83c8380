"""What messages and pages say to install can be installed: packages, and extras of a checkout, but none of an index."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embodied_rl.extras import install_command
from tests.packaging.test_pins import pins

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = sorted(
    path
    for folder in ("embodied_rl", "models", "envs", "config", "docs", "scripts", "constraints", ".ci")
    for path in [*(ROOT / folder).rglob("*"), ROOT / "README.md", ROOT / "Makefile"]
    if path.suffix in {".py", ".md", ".sh", ".yaml", ".txt", ""} and path.is_file()
)


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev", "docs"}))
def test_the_command_names_packages(extra: str) -> None:
    installed = importlib.metadata.metadata("embodied-rl").get_all("Provides-Extra") or ()
    if canonicalize_name(extra) not in map(canonicalize_name, installed):
        pytest.skip("this environment is older than pyproject.toml: make setup")
    command = install_command(extra)
    named = re.findall(r"'([^']+)'", command)
    assert {canonicalize_name(Requirement(text).name) for text in named} == {
        canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]
    }
    for name, version in re.findall(r"--no-deps (\S+)==(\S+)", command):
        assert pins(f"{extra}-hashes.txt") == {name: version}
    assert ("--no-deps" in command) == (extra in ("metaworld", "smollm2", "reasoning_gym"))


def test_there_is_no_other_extra() -> None:
    with pytest.raises(ValueError, match="no extra 'nosuchsim'"):
        install_command("nosuchsim")


def test_without_metadata_the_checkout_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("wandb") == "pip install -e '.[wandb]' in the folder of embodied_rl"


def test_nobody_is_sent_to_an_index_for_the_project() -> None:
    assert len(TEXTS) > 300
    wrong = [str(path) for path in TEXTS if re.search(r"pip install[^`\n]*embodied[-_]rl\[", path.read_text())]
    assert wrong == []


def test_extras_of_the_checkout_exist() -> None:
    named = {
        extra.strip()
        for path in TEXTS
        for group in re.findall(r"pip install[^`\n]*-e ['\"]\.\[([a-z0-9_,]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert {"libero", "maniskill", "robosuite", "wandb", "vllm"} <= named <= EXTRAS.keys()
