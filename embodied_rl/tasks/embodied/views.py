"""What a run's policy learned from, kept with its checkpoints, and told apart from what the run shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from embodied_rl.evaluation import views
from embodied_rl.evaluation.views import Views
from embodied_rl.plan import Start
from embodied_rl.schema import ModelConfig
from embodied_rl.workers.env import EnvReport


class PolicyViews:
    """Reads the thumbnails of what the run starts with, compares the first pictures that it shows, and writes them on.

    Args:
        say: prints a line in a colour.

    Raises:
        CheckpointError: the thumbnails are damaged.
    """

    def __init__(self, start: Start, model: ModelConfig, run_dir: Path, say: Callable[[str, str], None]) -> None:
        self._learned = _read(start, model)
        self._settled = start.resumed is not None and self._learned is not None
        """What is written is what was read, or what training began with."""
        self._run_dir, self._say = run_dir, say
        self._compared = False

    def learn(self, seen: Views | None) -> None:
        """The policy is trained on these, from here on. What it knew before stays, unless it was something else."""
        if seen is None or self._settled:
            return
        known = self._learned
        if known is not None and not any(one.differs for one in views.compare(known, seen).values()):
            seen = Views.merged([known, seen])
        self._learned, self._settled = seen, True

    def see(self, reports: Iterable[EnvReport], *, training: bool) -> None:
        """Compare what the run's first rollout, or an evaluation before it, began with; say what differs."""
        seen = Views.merged(report.views for report in reports if report.views is not None)
        if seen is None:
            return
        if self._learned is not None and not self._compared:
            for text in views.record(self._run_dir, self._learned, seen):
                self._say(text, "yellow")
        self._compared = True
        if training:
            self.learn(seen)

    def write(self, directory: Path) -> None:
        """Write them into a checkpoint, if there are any."""
        if self._learned is not None:
            self._learned.write(directory)


def _read(start: Start, model: ModelConfig) -> Views | None:
    given = start.resumed or start.initial
    if given is not None:
        return Views.read(given)
    folders = [Path(path) for path in (model.lora.path, model.path) if path is not None]
    return next((found for folder in folders if (found := Views.read(folder)) is not None), None)
