"""What a run tells whoever started it from Python: moments of its loop, and the wish to end it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Hooks:
    """Called in the driver's process. An exception ends the run as any error of the driver does: nothing is saved then
    that had not been. These do nothing; ``api.py`` has those that call a user's callbacks."""

    stopping: bool = False
    """Training is to end before its next step, which saves what is finished."""

    def started(self, run_dir: Path) -> None:
        """The run directory is there; workers come next."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """So many training steps are finished, logged and, where it was due, saved."""

    def evaluated(self, step: int) -> None:
        """The evaluation after so many steps is in the run directory."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is complete."""
