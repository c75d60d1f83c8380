"""A pickle that shows whether it was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class Exploding:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)
