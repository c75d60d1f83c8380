"""The generated pages are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/reference_pages.py"


def test_the_generated_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = module.pages()
    assert {"configuration.md", "algorithm_keys.md", "api.md", "libero.md"} <= {path.name for path in pages}
    for path, content in pages.items():
        assert path.read_text() == content, "run: python scripts/reference_pages.py"
