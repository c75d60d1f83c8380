"""The loop of ``task=embodied_sft``, which imitates recorded episodes, and its wiring.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  ================================  ==========================
runner                rollout workers                   actor ranks
====================  ================================  ==========================
demonstrate, receive  read step k + prefetch            receive: waits
                      => demonstrations                 <= those of step k
update                reads on                          update
save                                                    => checkpoint
====================  ================================  ==========================

Evaluations are those of :mod:`embodied_rl.tasks.embodied.run`; only they need the weights, and
the channels of turns and answers. Rollout workers send trajectories made of demonstrations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from embodied_rl.runtime.worker import Handle, WorkerGroup
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.tasks.embodied.run import EmbodiedRunner, show_workers
from embodied_rl.tasks.reporting import actor_metrics, longest
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.demonstrator import DemonstrationReport, DemonstrationSummary, ImitationWorker
from embodied_rl.workers.env import EnvWorker


class EmbodiedSftRunner(EmbodiedRunner):
    """Drives the three groups."""

    config: EmbodiedSftConfig  # type: ignore[assignment]
    demonstrations: DemonstrationSummary | None = None
    """None: nothing is trained."""

    @property
    def max_staleness(self) -> int:
        return self.config.data.prefetch

    def start_rollout(self, step: int, number: int = 0) -> Handle:  # type: ignore[override]
        """Read a training step's demonstrations."""
        return self.rollout.call(ImitationWorker.demonstrate, step=step)

    def evaluation_work(self) -> None:
        """Nobody plays between evaluations, so nothing says what one takes; see that there can be one at all.

        Raises:
            UserError: a task has fewer initial states than episodes.
        """
        self.env.call(EnvWorker.count_evaluated).wait()

    def train_step(self, step: int) -> dict[str, float]:
        """Demonstrations, update."""
        start = self.watch.begin()
        with self.part("data", step):
            self._ahead.begin(step)  # no policy makes them, so a version's number is the step's
            self.progress.describe("demonstrations")
            received = self.actor.call(ActorWorker.receive, step=step)
            reports: Sequence[DemonstrationReport] = self._ahead.take().wait()
            received.wait()
        data_s = time.perf_counter() - start
        with self.part("update", step):
            updates = self.update(step)
        samples = self.config.data.batch_size * (step + 1)
        assert self.demonstrations is not None
        metrics = actor_metrics(updates) | {
            "data/samples": float(sum(report.samples for report in reports)),
            **({"data/epoch": samples / self.demonstrations.num_frames} if self.config.data.weights is None else {}),
            "time/step": time.perf_counter() - start,
            "time/data": longest(reports, "data"),
            "time/data_wait": data_s,
        }
        return metrics | self.performance(metrics, {})

    def restore(self, checkpoint: Path) -> None:
        """Its envs evaluate only, and begin with every evaluation."""

    def warning(self, metrics: Mapping[str, float]) -> None:
        """Every demonstration teaches something."""


class EmbodiedSftWiring(Wiring[EmbodiedSftConfig]):
    """Env, rollout and actor groups, in this order."""

    _demonstrations: DemonstrationSummary | None = None

    def connect(self) -> tuple[WorkerGroup, ...]:
        self.make_channels(lanes=True)
        env, rollout, actor = self.backend.launch(
            [self.group("env", EnvWorker), self.group("rollout", ImitationWorker), self.group("actor", ActorWorker)]
        )
        self._spec = spec = self.spec(env.call(EnvWorker.setup, train=False).wait()[0])
        if not self.config.runner.only_eval:
            self._demonstrations = rollout.call(ImitationWorker.open, spec).wait()[0]
        statistics = self._demonstrations.action_statistics if self._demonstrations else None
        ready = [
            rollout.call(ImitationWorker.setup, spec),
            actor.call(ActorWorker.setup, spec, action_statistics=statistics),
        ]
        for handle in ready:
            handle.wait()
        return env, rollout, actor

    def describe(self) -> str:
        found, steps, batch_size = self._demonstrations, self.config.runner.max_steps, self.config.data.batch_size
        if found is None:
            return show_workers(self.plan)
        mixed = self.config.data.weights is not None  # each folder has passes of its own
        return (
            f"{show_workers(self.plan)}; {found.num_episodes} demonstrations of {found.num_frames} frames; {steps} "
            f"steps x {batch_size} frames" + f" = {steps * batch_size / found.num_frames:.1f} passes" * (not mixed)
        )

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> EmbodiedSftRunner:
        env, rollout, actor = groups
        runner = EmbodiedSftRunner(self.plan, env, rollout, actor, context)
        runner.demonstrations = self._demonstrations
        if self._demonstrations is not None:
            runner.views.learn(self._demonstrations.views)
        return runner
