"""Checkpoints: shards, their store and checksums, and resuming.

``checkpoints.shards`` is imported when it is first asked for: torch's DCP takes 0.6 s of CPU and 50 MB.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodied_rl.checkpoints import shards as shards


def __getattr__(name: str) -> ModuleType:
    if name != "shards":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
