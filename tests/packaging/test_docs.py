"""A reader's links and commands lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    """Strict: broken links and anchors, and pages that are not in the navigation, are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    loaded = re.compile(
        r"""<(?:script|img|link rel="(?:stylesheet|preconnect|icon)")[^>]*(?:src|href)="(?:https?:)?//"""
    )
    assert not [page.name for page in pages if loaded.search(page.read_text())]


def test_the_navigation_has_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"\b\w+\.md$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert re.findall(r"^  - (\w+):$", navigation, flags=re.MULTILINE) == ["Start", "Guides", "Extending", "Reference"]


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    missing = [name for name in pages if f"({name})" not in index]
    assert not missing


def test_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"run", "test"} <= named <= targets


@pytest.mark.parametrize("group", ["env", "data", "model", "algorithm", "cluster", "logger", "experiment"])
def test_readme_lists_every_choice_of_a_group(group: str) -> None:
    row = re.search(rf"^\| `{group}` \|(.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert row
    listed = set(re.findall(r"`([a-z0-9_]+)`", row[1]))
    assert listed == {path.stem for path in (ROOT / "config" / group).glob("*.yaml")} - {"base"}


def test_the_walk_through_the_architecture_is_true() -> None:
    """Each stop's file defines its name, and there are no more than twelve files to open."""
    page = (ROOT / "docs/architecture.md").read_text()
    stops = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert 8 < len(stops) <= 12
    for file, name in stops:
        assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {name}"
