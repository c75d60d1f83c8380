"""The embodied training loop.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  =====================  ===========================  ==========================
runner                env workers            rollout workers              actor ranks
====================  =====================  ===========================  ==========================
publish, load                                load weights v               => weights v
interact, serve,      reset, => request      <= request, act, => answer   receive: waits
receive               step, => request ...   for the next stage ...       <= trajectories, one by one
                      => trajectories
update                steps for later steps  acts for later steps         advantages, update
save                                                                      => checkpoint
====================  =====================  ===========================  ==========================

With ``rollout.max_staleness`` 0 nobody acts while the actor updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.evaluation.success import success_table
from embodied_rl.runners.base import TrainingLoop
from embodied_rl.runners.reporting import EvalReporter, Rollout, longest, train_metrics, warning
from embodied_rl.runtime.worker import Handle, WorkerGroup
from embodied_rl.schema import EmbodiedConfig, groups_per_step
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvReport, EnvWorker
from embodied_rl.workers.rollout import RolloutWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCalls:
    """A rollout under way."""

    interacted: Handle
    served: Handle

    def wait(self) -> Rollout:
        return Rollout(envs=self.interacted.wait(), policies=self.served.wait())


@dataclass(slots=True, kw_only=True)
class EmbodiedRunner(TrainingLoop[EmbodiedConfig]):
    """Drives the three groups."""

    rollout_worker = RolloutWorker

    env: WorkerGroup
    video_dir: Path
    """Of evaluations."""
    train_video_dir: Path
    reporter: EvalReporter

    def start_rollout(self, step: int, number: int = 0) -> RolloutCalls:
        """Start a rollout of all envs: of the step's rounds the one with this number."""
        wants_video = self.config.env.train.video_cfg.save_video and number == 0
        video_dir = self.train_video_dir / f"step_{step + 1:06d}" if wants_video else None
        first = number * self.config.algorithm.rollout_epoch
        return RolloutCalls(
            served=self.rollout.call(RolloutWorker.serve, mode="train", step=step, first_epoch=first),
            interacted=self.env.call(EnvWorker.interact, step=step, first_epoch=first, video_dir=video_dir),
        )

    def train_step(self, step: int) -> dict[str, float]:
        """Rollout, advantages, update, weight sync."""
        start = time.perf_counter()
        rollouts = self._roll_out(step)
        rollout_s = time.perf_counter() - start
        self.run_ahead(step)
        updates = self.update(step)
        sync_s = self.sync_if_due(step + 1)
        return train_metrics(rollouts, updates, rollout_s=rollout_s, sync_s=sync_s, step_s=time.perf_counter() - start)

    def _roll_out(self, step: int) -> list[Rollout]:
        """Fill the actor's batch: in several rounds where groups are filtered and may be drawn again."""
        self.progress.describe("rollout")
        rolling, received = self.next_rollout(), self.actor.call(ActorWorker.receive, step=step)
        rollouts = [rolling.wait()]
        kept = sum(received.wait())
        for number in range(1, 1 + self.config.algorithm.max_resample_rounds):
            if kept >= groups_per_step(self.config):
                break
            self.progress.describe(f"rollout, again ({number})")
            received = self.actor.call(ActorWorker.receive, step=step, more=True)
            rollouts.append(self.start_rollout(step, number).wait())
            kept = sum(received.wait())
        return rollouts

    def evaluate(self, step: int) -> float:
        """Every task's first initial states with the present policy: table, eval.json, videos, metrics."""
        start = time.perf_counter()
        self.progress.describe("evaluation")
        name = f"eval_step_{step:06d}"
        video_dir = self.video_dir / name if self.config.env.eval.video_cfg.save_video else None
        served = self.rollout.call(RolloutWorker.serve, mode="eval", step=step)
        reports: list[EnvReport] = self.env.call(EnvWorker.evaluate, video_dir=video_dir).wait()
        served.wait()
        episodes: Sequence[EpisodeRecord] = [episode for report in reports for episode in report.episodes]
        table = success_table(episodes)
        seconds = time.perf_counter() - start
        videos = [path for report in reports for path in report.videos]
        self.reporter.report(table, step=step, seconds=seconds, videos=videos, name=name)
        self.logger.log(
            step,
            {
                "success_rate": table.overall.success_rate,
                "mean_task_success": table.mean_task_success,
                "episodes": table.overall.episodes,
                "return": table.overall.mean_return,
                "seconds": seconds,
                "wait_seconds": longest(reports, "wait"),
            },
            prefix="eval",
        )
        for path in videos:
            self.logger.log_video(step, f"eval/{path.stem}", path)
        return table.overall.success_rate

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        return warning(metrics, self.config)
