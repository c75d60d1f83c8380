"""The loop of ``task=sft``, which imitates demonstrations of language, and its wiring.

As :mod:`embodied_rl.tasks.math.run`, but the generation workers send demonstrations instead of completions of their
own, so they need the weights only to evaluate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from embodied_rl.tasks.embodied.reporting import longest
from embodied_rl.tasks.math.run import MathRunner, MathWiring
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.generation import GenerationWorker


class SftRunner(MathRunner):
    """Drives the two groups."""

    def train_step(self, step: int) -> dict[str, float]:
        """Demonstrations, update."""
        start = time.perf_counter()
        received = self.actor.call(ActorWorker.receive, step=step)
        tokens: list[int] = self.rollout.call(GenerationWorker.demonstrate, step=step).wait()
        received.wait()
        rollout_s = time.perf_counter() - start
        updates = self.update(step)
        metrics = {f"actor/{name}": value for name, value in updates[0].metrics.items()}
        return metrics | {
            "rollout/tokens": float(sum(tokens)),
            "time/step": time.perf_counter() - start,
            "time/rollout": rollout_s,
            "time/update": longest(updates, "update"),
        }

    def warning(self, metrics: Mapping[str, float]) -> None:
        """Every demonstration teaches something."""


class SftWiring(MathWiring):
    """The groups of ``task=math`` with another loop."""

    loop = SftRunner
