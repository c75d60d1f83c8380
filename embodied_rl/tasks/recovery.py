"""A run that a failure ended goes on from its newest whole checkpoint, in the same command (``runner.recover``)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from embodied_rl.checkpoints.store import complete_checkpoints, later_checkpoints, newest_whole
from embodied_rl.errors import CheckpointError
from embodied_rl.files import set_aside
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import WorkerError
from embodied_rl.tasks.planning import start_at

_LONGEST_PAUSE_S: Final = 60.0


class Recovery:
    """Decides whether a run that failed goes on, and from where."""

    def __init__(self, plan: RunPlan[Any], run_dir: Path, console: Console) -> None:
        self._plan, self._checkpoints, self._console = plan, run_dir / "checkpoints", console
        self.count = 0
        """Recoveries so far."""
        self._gained = -1
        """Training steps in the checkpoint of the last recovery."""
        resumed = plan.start.resumed
        self._others = {_identity(path) for path in later_checkpoints(resumed)} if resumed else set()
        """Of later steps than the run begins at, from before."""

    def after(self, error: WorkerError) -> RunPlan[Any]:
        """Wait a little and return the plan of the run that goes on.

        Raises:
            WorkerError: the same, with the reason why the run does not go on.
        """
        runner = self._plan.config.runner
        if runner.recover == "never" or runner.only_eval:
            raise error
        checkpoint = self._newest_whole()
        if checkpoint is None:
            raise _with(error, "no recovery: there is no checkpoint of this run yet")
        start = start_at(checkpoint, self._plan.config)
        if start.step <= self._gained:
            raise _with(error, f"no recovery: no checkpoint was made since the last one, at step {start.step}")
        if self.count >= runner.max_recoveries:
            raise _with(error, f"no recovery: there were {self.count} (runner.max_recoveries)")
        seconds = min(2.0**self.count, _LONGEST_PAUSE_S)
        self.count, self._gained = self.count + 1, start.step
        self._say(str(error), None)
        self._say(
            f"recovery {self.count} of at most {runner.max_recoveries}: in {seconds:g} s the run goes on from "
            f"{checkpoint}"
        )
        time.sleep(seconds)  # in which what made it fail (memory, a device) may pass
        return dataclasses.replace(self._plan, start=dataclasses.replace(start, recovered=True))

    def _newest_whole(self) -> Path | None:
        found = [path for path in complete_checkpoints(self._checkpoints) if _identity(path) not in self._others]
        return newest_whole(found, aside(self._say))

    def _say(self, text: str, style: str | None = "yellow") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def aside(say: Callable[[str], None]) -> Callable[[Path, CheckpointError], None]:
    """For :func:`newest_whole`: give damaged checkpoints a name by which no run resumes them, and say so."""
    return lambda checkpoint, damage: say(f"{damage}\nset aside as {set_aside(checkpoint, 'damaged').name}")


def _identity(checkpoint: Path) -> tuple[int, int]:
    status = checkpoint.stat()
    return status.st_ino, status.st_mtime_ns


def _with(error: WorkerError, reason: str) -> WorkerError:
    """The error with a reason at its end, of the same class, which the exit status depends on."""
    return type(error)(f"{error}\n({reason})")
