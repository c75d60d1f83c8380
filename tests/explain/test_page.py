"""The generated page is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/algorithm_keys_page.py"


def test_the_algorithm_keys_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("algorithm_keys_page", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python scripts/algorithm_keys_page.py"
