"""The training loop of every task: when to step, evaluate and save, and how weights travel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from embodied_rl.errors import listed
from embodied_rl.monitoring.peak_memory import PeakMemory, memory_metrics
from embodied_rl.monitoring.performance import ROLLOUT, StepWatch, Waits, performance
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.load import utilisation
from embodied_rl.runtime.worker import Handle, WorkerGroup
from embodied_rl.schema import EmbodiedConfig, MathConfig
from embodied_rl.tasks.due import evaluates_after, misses_evaluation
from embodied_rl.tasks.reporting import actor_metrics
from embodied_rl.tasks.saving import CheckpointSaver
from embodied_rl.tasks.wiring import RunContext, component_of
from embodied_rl.workers.actor import ActorWorker, UpdateReport

C = TypeVar("C", bound=EmbodiedConfig | MathConfig)

_ON_DEVICES: Final = (
    ("rollout", ROLLOUT, ("inference", "generate")),
    ("actor", ROLLOUT, ("scoring_ahead",)),
    ("actor", "update", ("scoring", "values", "encoding", "critic", "update")),
)
"""Component, part of a step, and its phases that use an accelerator."""


class LoadsWeights(Protocol):
    """A worker that acts or generates with the actor's weights."""

    async def load_weights(self, version: int) -> int: ...


class TrainingLoop(Generic[C]):
    """A task says what a rollout and an evaluation are; the rest is here."""

    rollout_worker: ClassVar[type[LoadsWeights]]
    """The class of the workers that the weights go to."""
    rollout_name: ClassVar[str] = "rollout"
    """Name of a rollout on the progress bar."""

    def __init__(self, plan: RunPlan[C], rollout: WorkerGroup, actor: WorkerGroup, context: RunContext) -> None:
        self.plan, self.config, self.first_step = plan, plan.config, plan.start.step
        self.rollout, self.actor = rollout, actor
        self.run_dir, self.logger = context.run_dir, context.logger
        self.progress, self.say, self.hooks = context.progress, context.say, context.hooks
        self.trace, self.watch = context.trace, StepWatch(context.loads)
        self._begins = context.begins
        self._ahead: Lookahead[Any] = Lookahead(
            max_staleness=self.max_staleness,
            first=self.first_step,
            end=self.config.runner.max_steps,
            start=self.start_rollout,
        )
        self.saver = CheckpointSaver(
            config=self.config.runner,
            run_dir=self.run_dir,
            actor=actor,
            finished=self.first_step,
            began_with=plan.start.began_with,
            saved=self.first_step or None,
            also=self.save_state,
            published=self.hooks.saved,
        )
        self._version: int | None = None
        """Version of the weights that the rollout workers hold, or take before they begin anything new."""
        self._loading: deque[tuple[int, int, Handle]] = deque()
        """Versions on their way to the rollout workers: the first training step whose rollout starts with it, the
        version, and the call to take it."""
        self._warned: str | None = None
        self._idle: tuple[str, ...] = ()

    def run(self) -> None:
        """Train from ``first_step`` to ``max_steps`` or ``stop_at``, or evaluate only."""
        with self.saver.interruptible(self.say):
            self._run()

    def _run(self) -> None:
        cfg = self.config.runner
        self.sync(self.first_step)
        if cfg.only_eval:
            self._evaluate(self.first_step)
            return
        if self.plan.start.resumed is not None:
            self.restore(self.plan.start.resumed)
        work = self.evaluation_work() if self._evaluations_after(self.first_step) else None
        self._begins()
        missing = self._misses_evaluation()
        if missing or (cfg.val_before_train and not self.plan.start.recovered):
            reached = self._evaluate(self.first_step)
            if missing and self._reaches_goal(self.first_step, reached):
                return
        self.progress.begin_steps(self._evaluations_after)
        memory = PeakMemory("cpu")
        for step in range(self.first_step, cfg.max_steps):
            if self.hooks.stopping:
                self.say(f"step {step}: a callback asked for the end; {self.saver.save_at_termination()}")
                break
            memory.begin()
            metrics = self.train_step(step)
            metrics |= utilisation(self.watch.first, self.watch.last) | memory_metrics("driver", [memory.end()])
            done = step + 1
            self.trace.merge(done)
            last = done == cfg.max_steps
            # Logged before it is saved: a run killed in between resumes before this step and logs it again.
            self.logger.log(done, metrics)
            self.progress.show(metrics)
            self.warn(step, metrics)
            if self.saver.step_finished(done, last=last):
                self.progress.describe("checkpoint")
                self.saver.save()
            if work is not None:
                seconds = metrics["time/step" if self.max_staleness else "time/rollout"]
                self.progress.expect_evaluation(work * seconds / metrics["rollout/rounds"])
            self.progress.advance()
            self.hooks.stepped(done, metrics)
            self.saver.end_if_interrupted()
            if evaluates_after(self.config.runner, done):
                self.sync(done)
                if self._reaches_goal(done, self._evaluate(done)):
                    break
        self.saver.wait()

    def _misses_evaluation(self) -> bool:
        """Whether the run that goes on here has no evaluation after its checkpoint's step, where one is due."""
        resumed = self.plan.start.resumed
        return resumed is not None and misses_evaluation(self.config.runner, resumed, self.first_step)

    def _evaluations_after(self, done: int) -> int:
        """Number of evaluations after later steps than these."""
        last, interval = self.config.runner.max_steps, self.config.runner.val_check_interval
        if done >= last:
            return 0
        before_the_end = (last - 1) // interval - done // interval if interval > 0 else 0
        return before_the_end + evaluates_after(self.config.runner, last)

    def _evaluate(self, step: int) -> float:
        with self.progress.phase("evaluation"):
            reached = self.evaluate(step)
        self.hooks.evaluated(step)
        return reached

    def _reaches_goal(self, done: int, reached: float) -> bool:
        """Whether an evaluation during training came to ``runner.stop_at``, which ends it with a checkpoint."""
        goal = self.config.runner.stop_at
        if goal is None or done == self.config.runner.max_steps:
            return False
        if not reached >= goal:  # NaN, of an evaluation that verified nothing, reaches none
            return False
        saved = self.saver.save_at_termination()
        self.say(f"step {done}: evaluated at {reached:.1%}, at least runner.stop_at={goal:.1%}: the end; {saved}")
        return True

    @property
    def max_staleness(self) -> int:
        """Maximum policy lag, in updates: how far a rollout's weights may trail its training step's."""
        return self.config.rollout.max_staleness

    @property
    def syncs_within(self) -> bool:
        """Whether the rollout workers take weights in the middle of a rollout that runs ahead."""
        return self.config.rollout.interruptible

    def start_rollout(self, step: int, number: int = 0) -> Any:
        """Start a rollout of training step ``step``, of its rounds the one with this number, without waiting for it."""
        raise NotImplementedError

    def next_rollout(self) -> Any:
        """The result of :meth:`start_rollout` for the present training step. Later rollouts go on meanwhile."""
        assert self._version is not None
        self._ahead.begin(self._version)
        return self._ahead.take()

    def run_ahead(self, step: int, rounds: Sequence[Any]) -> None:
        """Start what may run while training step ``step`` updates, whose rollouts ``rounds`` are complete."""
        assert self._version is not None
        self._confirm(step)
        self._ahead.begin(self._version)

    def roll_out(self, step: int) -> list[Any]:
        """The rollouts that fill the actor's batch: several rounds where groups are filtered and may be drawn again."""
        self.progress.describe(self.rollout_name)
        rollout, received = self.next_rollout(), self.actor.call(ActorWorker.receive, step=step)
        rounds = [rollout.wait()]
        kept = sum(received.wait())
        for number in range(1, 1 + self.config.algorithm.max_resample_rounds):
            if kept >= self.plan.arithmetic.groups:
                break
            self.progress.describe(f"{self.rollout_name}, again ({number})")
            received = self.actor.call(ActorWorker.receive, step=step, more=True)
            rounds.append(self.start_rollout(step, number).wait())
            kept = sum(received.wait())
        return rounds

    def train_step(self, step: int) -> dict[str, float]:
        """Do training step ``step`` and return its metrics: rollout, advantages, update, weight sync."""
        start = self.watch.begin()
        with self.part(ROLLOUT, step):
            rounds = self.roll_out(step)
        rollout_s = time.perf_counter() - start
        with self.part("update", step):
            self.run_ahead(step, rounds)
            updates = self.update(step)
        with self.part("sync", step):
            sync_s = 0.0 if self.saver.interrupted else self.sync_if_due(step + 1)
        # Only now, so that a checkpoint of the step before, saved on SIGTERM, has the state of that step.
        metrics = self.rollout_metrics(rounds, rollout_s) | actor_metrics(updates)
        metrics |= {
            "rollout/rounds": float(len(rounds)),
            "time/step": time.perf_counter() - start,
            "time/rollout": rollout_s,
            "time/sync": sync_s,
        }
        return metrics | self.performance(metrics, self.waits(rounds))

    @contextmanager
    def part(self, name: str, step: int) -> Iterator[None]:
        """A part of a training step, for the trace and :meth:`performance`."""
        with self.trace.call(name, step):
            yield
        self.watch.end(name)

    def performance(self, metrics: Mapping[str, float], waits: Waits) -> dict[str, float]:
        """The present training step against the least time that its work allows.

        Args:
            metrics: its seconds by phase.
            waits: of its rollouts.
        """
        self.watch.end("rest")
        used: dict[int, dict[str, float]] = {}
        for component, part, phases in _ON_DEVICES:
            seconds = sum(metrics.get(f"time/{phase}", 0.0) for phase in phases)
            ranks = enumerate(self.plan.placement.slots[component])
            for slot in {slot for rank, slot in ranks if self.plan.placement.device(component, rank) != "cpu"}:
                parts = used.setdefault(slot, {})
                parts[part] = parts.get(part, 0.0) + seconds
        return performance(
            self.watch.parts,
            component=component_of,
            threads=self.plan.threads,
            devices=list(used.values()),
            waits=waits,
        )

    def waits(self, rounds: Sequence[Any]) -> Waits:
        """What the workers of a training step's rollouts waited for."""
        raise NotImplementedError

    def rollout_metrics(self, rounds: Sequence[Any], seconds: float) -> dict[str, float]:
        """Metrics of a training step's rollouts, which took so many wall seconds; note the state that they end in."""
        raise NotImplementedError

    def save_state(self, directory: Path) -> None:
        """Write into a checkpoint the part of the finished training steps that the actor does not hold."""

    def restore(self, checkpoint: Path) -> None:
        """Read again what :meth:`save_state` wrote."""

    def evaluate(self, step: int) -> float:
        """Evaluate and report the weights after ``step`` training steps; returns their success rate or accuracy."""
        raise NotImplementedError

    def evaluation_work(self) -> float | None:
        """Work of an evaluation, at most, as a multiple of a training rollout's; None: no rollout is like it."""
        return None

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Why a step cannot have taught anything, and what to do; None if it can."""
        raise NotImplementedError

    def warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say so where a step taught nothing, once for as long as it stays so."""
        text = self.warning(metrics)
        if text is not None and text != self._warned:
            self.say(f"step {step + 1}: {text}", "yellow")
        self._warned = text

    def update(self, step: int) -> list[UpdateReport]:
        """Let the actor train on what it has received."""
        self.progress.describe("update")
        self.saver.update_begins()
        reports: list[UpdateReport] = self.actor.call(ActorWorker.update, step=step).wait()
        self._warn_of_idle_parameters(step, reports[0].without_gradient)
        return reports

    def _warn_of_idle_parameters(self, step: int, names: tuple[str, ...]) -> None:
        """Say so where parameters are to be trained that no loss reaches, once for as long as they are the same."""
        if names and names != self._idle:
            self.say(
                f"step {step + 1}: no gradient for {listed(names, 3)}: they stay as they are, since nothing "
                "that the loss depends on reads them",
                "yellow",
            )
        self._idle = names

    def sync_if_due(self, version: int) -> float:
        """Call :meth:`sync` each ``runner.weight_sync_interval`` versions; returns the seconds it took."""
        return 0.0 if version % self.config.runner.weight_sync_interval else self.sync(version)

    def sync(self, version: int) -> float:
        """Bring the actor's weights to every rollout worker, unless they have them; returns the seconds it took.

        A version is the number of updates behind it. Where rollouts run ahead, workers take it when those are done, or
        in their middle.
        """
        if version == self._version:
            return 0.0
        self._loading.append((self._ahead.next, version, self.rollout.call(self.rollout_worker.load_weights, version)))
        seconds: list[float] = self.actor.call(ActorWorker.publish_weights, version).wait()
        if not self.syncs_within:
            self._confirm(self._ahead.next)
        self._version = version
        return max(seconds)

    def _confirm(self, step: int) -> None:
        """Wait for the versions with which the rollouts of ``step`` and of earlier steps were to start."""
        while self._loading and self._loading[0][0] <= step:
            _, version, loaded = self._loading.popleft()
            versions: list[int] = loaded.wait()
            # One that was on its way in the middle of a rollout may have been followed by others.
            assert min(versions) >= version, f"rollout workers hold {versions}, expected {version}"


H = TypeVar("H")


@dataclass(slots=True, kw_only=True)
class Lookahead(Generic[H]):
    """Starts the rollouts of training steps in their order, each as soon as the bound allows.

    Training step s takes weights that s updates made. A rollout of weights of version v may be for any step up to
    v + ``max_staleness``, so with B samples a step a new sample may be begun while ``finished + running <
    (v + max_staleness + 1) B`` (AReaL, arXiv:2505.24298, eq. 3, without its samples that are thrown away: none is).
    What is trained on follows from the step and the version alone, so a run that resumes has nothing to remember.
    """

    max_staleness: int
    """0: a rollout starts with the newest weights only."""
    first: int
    """Training step of the first rollout."""
    end: int
    """There is no rollout for this training step, nor for later ones."""
    start: Callable[[int], H]
    """Starts a training step's rollout, without waiting for it."""
    _running: deque[H] = field(default_factory=deque, init=False)
    _taken: int = field(default=0, init=False)

    @property
    def next(self) -> int:
        """The training step whose rollout is started next."""
        return self.first + self._taken + len(self._running)

    def begin(self, version: int) -> None:
        """Start every rollout that weights of ``version`` may still serve."""
        while self.next < min(version + self.max_staleness + 1, self.end):
            self._running.append(self.start(self.next))

    def take(self) -> H:
        """The next training step's rollout. Where the bound did not allow to start it yet it is started now: whoever
        calls has the newest weights that it will get."""
        if not self._running:
            self._running.append(self.start(self.next))
        self._taken += 1
        return self._running.popleft()
