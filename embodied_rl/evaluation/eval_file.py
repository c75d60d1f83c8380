"""``eval.json``: its version, and how files of an evaluation are written. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FILE_NAME: Final = "eval.json"
SCHEMA_VERSION: Final = 2
"""Rises when a field changes its meaning or goes away, not when one is added. Files without it list no episodes."""
EPISODES: Final = "episodes"
"""``kind`` of an evaluation in a simulator."""
COMPLETIONS: Final = "completions"
"""``kind`` of an evaluation of a language model."""


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write ``report`` to ``path`` in one atomic step, with the directories above it.

    Raises:
        TypeError, ValueError: it holds something that JSON has no word for.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def number_or_null(value: float | None, digits: int = 6) -> float | None:
    """A rounded number; None, which JSON has a word for, where there is none or it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
