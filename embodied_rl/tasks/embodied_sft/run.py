"""The training loop that imitates recorded episodes.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  ================================  ==========================
runner                rollout workers                   actor ranks
====================  ================================  ==========================
demonstrate, receive  read step k + prefetch            receive: waits
                      => demonstrations                 <= those of step k
update                reads on                          update
save                                                    => checkpoint
====================  ================================  ==========================

Evaluations are those of :mod:`embodied_rl.tasks.embodied.run`; only they need the weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.runtime.worker import Handle
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.tasks.embodied.reporting import longest
from embodied_rl.tasks.embodied.run import EmbodiedRunner
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.demonstrator import DemonstrationReport, DemonstrationSummary, ImitationWorker


@dataclass(slots=True, kw_only=True)
class EmbodiedSftRunner(EmbodiedRunner):
    """Drives the three groups."""

    config: EmbodiedSftConfig  # type: ignore[assignment]
    demonstrations: DemonstrationSummary | None
    """None: nothing is trained."""

    @property
    def max_staleness(self) -> int:
        return self.config.data.prefetch

    def start_rollout(self, step: int, number: int = 0) -> Handle:  # type: ignore[override]
        """Read a training step's demonstrations."""
        return self.rollout.call(ImitationWorker.demonstrate, step=step)

    def train_step(self, step: int) -> dict[str, float]:
        """Demonstrations, update."""
        start = time.perf_counter()
        self._ahead.begin(step)  # no policy makes them, so a version's number is the step's
        self.progress.describe("demonstrations")
        received = self.actor.call(ActorWorker.receive, step=step)
        reports: Sequence[DemonstrationReport] = self._ahead.take().wait()
        received.wait()
        data_s = time.perf_counter() - start
        updates = self.update(step)
        samples = self.config.data.batch_size * (step + 1)
        assert self.demonstrations is not None
        metrics = {f"actor/{name}": value for name, value in updates[0].metrics.items()}
        return metrics | {
            "data/samples": float(sum(report.samples for report in reports)),
            "data/epoch": samples / self.demonstrations.num_frames,
            "time/step": time.perf_counter() - start,
            "time/data": longest(reports, "data"),
            "time/data_wait": data_s,
            "time/update": longest(updates, "update"),
        }

    def restore(self, checkpoint: Path) -> None:
        """Its envs evaluate only, and begin with every evaluation."""

    def warning(self, metrics: Mapping[str, float]) -> None:
        """Every demonstration teaches something."""
