"""The loops of ``task=math`` and ``task=sft``, and their wiring.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  ===========================  ==========================
runner                generation workers           actor ranks
====================  ===========================  ==========================
publish, load         load weights v               => weights v
generate, receive     prompts, tokens, scores      receive: waits
                      => trajectories              <= trajectories
update                generates for later steps    advantages, update
save                                               => checkpoint
====================  ===========================  ==========================

With ``rollout.max_staleness`` 0 nothing is generated while the actor updates.

============  =================  =================  ==================
channel       from               to                 key
============  =================  =================  ==================
trajectories  generation worker  actor rank         actor rank
weights       actor rank 0       generation worker  generation worker
============  =================  =================  ==================
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from embodied_rl.contracts import Spaces
from embodied_rl.language.accuracy import evaluation_of
from embodied_rl.models.flops import SampleCost
from embodied_rl.monitoring.performance import ROLLOUT, Waits
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import Handle, WorkerGroup
from embodied_rl.schema import MathConfig
from embodied_rl.tasks.loop import TrainingLoop
from embodied_rl.tasks.math.reporting import (
    MathReporter,
    all_records,
    eval_metrics,
    perf,
    rollout_metrics,
    sample_text,
    waits,
    warning,
)
from embodied_rl.tasks.reporting import actor_metrics
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.actor import ActorWorker, UpdateReport
from embodied_rl.workers.generation import GenerationReport, GenerationWorker


class MathRunner(TrainingLoop[MathConfig]):
    """Drives the two groups."""

    rollout_worker = GenerationWorker
    rollout_name = "generation"

    def __init__(
        self, plan: RunPlan[MathConfig], rollout: WorkerGroup, actor: WorkerGroup, context: RunContext
    ) -> None:
        super().__init__(plan, rollout, actor, context)
        self._cost: SampleCost | None = None
        """Operations of a sample, from the first update on."""
        self.reporter = MathReporter(
            config=plan.config,
            run_dir=context.run_dir,
            console=context.console,
            checkpoint=context.checkpoint,
            first_step=plan.start.step,
        )

    def start_rollout(self, step: int, number: int = 0) -> Handle:
        return self.rollout.call(GenerationWorker.generate, step=step, number=number)

    def roll_out(self, step: int) -> list[Sequence[GenerationReport]]:
        """As the base, and write the completions down."""
        rounds = super().roll_out(step)
        path = self.run_dir / "samples" / f"step_{step + 1:06d}.jsonl"
        self.reporter.write_samples(path, all_records(report for reports in rounds for report in reports))
        return rounds

    def update(self, step: int) -> list[UpdateReport]:
        updates = super().update(step)
        self._cost = next((report.cost for report in updates if report.cost is not None), self._cost)
        return updates

    def rollout_metrics(self, rounds: Sequence[Sequence[GenerationReport]], seconds: float) -> dict[str, float]:
        metrics = rollout_metrics(rounds, threshold=self.config.reward.success_threshold)
        if self._cost is not None:
            metrics |= perf(rounds, self._cost, group_size=self.plan.arithmetic.group_size)
        return metrics

    def waits(self, rounds: Sequence[Sequence[GenerationReport]]) -> Waits:
        return waits(rounds)

    def evaluate(self, step: int) -> float:
        """Every held-out prompt with the present policy: accuracy, eval.json, samples, metrics."""
        start = time.perf_counter()
        records = all_records(self.rollout.call(GenerationWorker.evaluate, step=step).wait())
        evaluation = evaluation_of(
            records,
            threshold=self.config.reward.success_threshold,
            per_prompt=self.config.data.eval_completions,
        )
        seconds = time.perf_counter() - start
        self.reporter.report(evaluation, records, step=step, seconds=seconds)
        self.logger.log(step, eval_metrics(evaluation, seconds=seconds), prefix="eval")
        self.logger.log_text(step, "eval/samples", sample_text(records))
        return evaluation.overall.accuracy

    def evaluation_work(self) -> float | None:
        numbers, prompts = self.plan.arithmetic, self.rollout.call(GenerationWorker.count_held_out).wait()[0]
        return prompts * self.config.data.eval_completions / (numbers.groups * numbers.group_size)

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        return warning(metrics, self.config)


class MathWiring(Wiring[MathConfig]):
    """Generation (component ``rollout``) and actor groups, in this order."""

    loop = MathRunner

    def connect(self) -> tuple[WorkerGroup, ...]:
        self.make_channels()
        rollout, actor = self.backend.launch(
            [self.group("rollout", GenerationWorker), self.group("actor", ActorWorker)]
        )
        spec = self.spec(Spaces(action_dim=1, state_dim=0, image_shapes={}))
        ready = [rollout.call(GenerationWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return rollout, actor

    def describe(self) -> str:
        plan, rollout = self.plan, self.config.rollout
        prompts, size = plan.arithmetic.groups, plan.arithmetic.group_size
        return (
            f"{plan.world_size('rollout')} rollout ({rollout.backend}), {plan.world_size('actor')} actor worker(s); "
            f"{prompts} prompts x {size} completions = {prompts * size} of at most {rollout.max_new_tokens} tokens a "
            "step"
        )


class SftRunner(MathRunner):
    """The loop of ``task=sft``: the generation workers send demonstrations of language instead of completions of their
    own, so they need the weights only to evaluate."""

    def train_step(self, step: int) -> dict[str, float]:
        """Demonstrations, update."""
        start = self.watch.begin()
        with self.part(ROLLOUT, step):
            received = self.actor.call(ActorWorker.receive, step=step)
            tokens: list[int] = self.rollout.call(GenerationWorker.demonstrate, step=step).wait()
            received.wait()
        rollout_s = time.perf_counter() - start
        with self.part("update", step):
            updates = self.update(step)
        metrics = actor_metrics(updates) | {
            "rollout/tokens": float(sum(tokens)),
            "time/step": time.perf_counter() - start,
            "time/rollout": rollout_s,
        }
        return metrics | self.performance(metrics, {})

    def evaluation_work(self) -> None:
        """Nothing is generated between evaluations."""

    def warning(self, metrics: Mapping[str, float]) -> None:
        """Every demonstration teaches something."""


class SftWiring(MathWiring):
    """The groups of ``task=math`` with another loop."""

    loop = SftRunner
