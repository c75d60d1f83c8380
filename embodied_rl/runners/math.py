"""The training loop of language models.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  ===========================  ==========================
runner                generation workers           actor ranks
====================  ===========================  ==========================
publish, load         load weights v               => weights v
generate, receive     prompts, tokens, scores      receive: waits
                      => trajectories              <= trajectories
update                                             advantages, update
save                                               => checkpoint
====================  ===========================  ==========================
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embodied_rl.evaluation.accuracy import Accuracy, accuracy_of
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.progress import Progress
from embodied_rl.runners.math_reporting import MathReporter, all_records, train_metrics, warning
from embodied_rl.runtime.worker import WorkerGroup
from embodied_rl.schema import MathConfig
from embodied_rl.training import checkpoint_store
from embodied_rl.training.checkpoint_store import RunState
from embodied_rl.workers.actor import ActorWorker, UpdateReport
from embodied_rl.workers.generation import GenerationReport, GenerationWorker


@dataclass(slots=True, kw_only=True)
class MathRunner:
    """Drives the two groups. Everything it does is in :meth:`run` and the steps it calls."""

    config: MathConfig
    run_dir: Path
    rollout: WorkerGroup
    actor: WorkerGroup
    logger: MetricLogger
    progress: Progress
    reporter: MathReporter
    first_step: int = 0
    _warned: str | None = field(default=None, init=False)

    def run(self) -> None:
        """Train from ``first_step`` to ``max_steps``, or evaluate only."""
        cfg = self.config.runner
        self._sync(self.first_step)
        if cfg.only_eval:
            self.evaluate(self.first_step)
            return
        if cfg.val_before_train:
            self.evaluate(self.first_step)
        for step in range(self.first_step, cfg.max_steps):
            metrics = self.train_step(step)
            done = step + 1
            last = done == cfg.max_steps
            # Logged before it is saved: a run killed in between resumes before this step and logs it again.
            self.logger.log(done, metrics)
            self.warn(step, metrics)
            if cfg.save_interval > 0 and (done % cfg.save_interval == 0 or last):
                self.save(done)
            self.progress.advance()
            if (cfg.val_check_interval > 0 and done % cfg.val_check_interval == 0) or (last and cfg.eval_at_end):
                self.evaluate(done)

    def train_step(self, step: int) -> dict[str, float]:
        """Completions, advantages, update, weight sync."""
        start = time.perf_counter()
        rounds = self._generate(step)
        rollout_s = time.perf_counter() - start
        self.progress.describe("update")
        updates: list[UpdateReport] = self.actor.call(ActorWorker.update, step=step).wait()
        sync_s = self._sync(step + 1)
        return train_metrics(
            rounds,
            updates,
            threshold=self.config.reward.success_threshold,
            rollout_s=rollout_s,
            sync_s=sync_s,
            step_s=time.perf_counter() - start,
        )

    def _generate(self, step: int) -> list[Sequence[GenerationReport]]:
        """Fill the actor's batch: in several rounds where groups are filtered and may be drawn again."""
        rounds: list[Sequence[GenerationReport]] = []
        for number in range(1 + self.config.algorithm.max_resample_rounds):
            self.progress.describe("generation" if number == 0 else f"generation, again ({number})")
            received = self.actor.call(ActorWorker.receive, more=number > 0)
            rounds.append(self.rollout.call(GenerationWorker.generate, step=step, number=number).wait())
            if sum(received.wait()) >= self.config.data.rollout_batch_size:
                break
        self.reporter.write_samples(
            self.run_dir / "samples" / f"step_{step + 1:06d}.jsonl", all_records(r for part in rounds for r in part)
        )
        return rounds

    def evaluate(self, step: int) -> Accuracy:
        """Every held-out prompt with the present policy: accuracy, eval.json, samples, metrics."""
        start = time.perf_counter()
        self.progress.describe("evaluation")
        records = all_records(self.rollout.call(GenerationWorker.evaluate, step=step).wait())
        accuracy = accuracy_of(records, threshold=self.config.reward.success_threshold)
        seconds = time.perf_counter() - start
        self.reporter.report(accuracy, records, step=step, seconds=seconds)
        self.logger.log(
            step,
            {
                "accuracy": accuracy.accuracy,
                "score": accuracy.mean_score,
                "length": accuracy.mean_length,
                "truncated": accuracy.truncated,
                "unverified": accuracy.unverified / accuracy.completions,
                "completions": accuracy.completions,
                "seconds": seconds,
            },
            prefix="eval",
        )
        return accuracy

    def warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say so where a step taught nothing, once for as long as it stays so."""
        text = warning(metrics, self.config)
        if text is not None and text != self._warned:
            self.reporter.console.print(f"step {step + 1}: {text}", style="yellow", highlight=False)
        self._warned = text

    def save(self, done: int) -> None:
        """Write and publish a checkpoint after ``done`` steps."""
        self.progress.describe("checkpoint")
        directory = checkpoint_store.checkpoint_dir(self.run_dir, done)
        scratch = checkpoint_store.begin(directory)
        self.actor.call(ActorWorker.save, scratch).wait()
        state = RunState(step=done, policy_version=done)
        checkpoint_store.publish(scratch, directory, state, max_keep=self.config.runner.max_keep)

    def _sync(self, version: int) -> float:
        """Bring the actor's weights to every generation worker; a version is the number of updates behind it."""
        loaded = self.rollout.call(GenerationWorker.load_weights)
        seconds: list[float] = self.actor.call(ActorWorker.publish_weights, version).wait()
        versions: list[int] = loaded.wait()
        assert set(versions) == {version}, f"generation workers hold {versions}, expected {version}"
        return max(seconds)
