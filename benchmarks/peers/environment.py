"""Where the peers' environment is."""

from __future__ import annotations

import sys
from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
HOW_TO_MAKE = "no .venv-peers here: bash benchmarks/peers/setup.sh makes it (1.9 GB, about two minutes)"


def exists() -> bool:
    return PYTHON.exists()


def require() -> None:
    if not exists():
        sys.exit(HOW_TO_MAKE)
