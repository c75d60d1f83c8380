"""The loop of ``task=dagger``, and its wiring: ``task=embodied_sft`` with rounds of new demonstrations between steps.

A round, before training step k ``dagger.interval``; ``=>`` is a file:

==========================  ==========================  =========================  =============
runner                      collectors                  rollout workers            actor ranks
==========================  ==========================  =========================  =============
save                                                                               => checkpoint
plan, play                  <= checkpoint; play, =>
                            episodes (``.staging``)
publish => ``dagger/k``                                 <= ``dagger/k``, too
==========================  ==========================  =========================  =============

What a round plays is a function of the configuration, the round and the weights. So a run that was stopped in one plays
what is missing, and one that goes on from a checkpoint has the rounds before it in its directory.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Final

from embodied_rl.checkpoints.store import checkpoint_dir
from embodied_rl.demonstrations.collection import Collection
from embodied_rl.demonstrations.lerobot.episode import count_staged
from embodied_rl.demonstrations.plan import Job, evaluated_too, plan
from embodied_rl.errors import CheckpointError, listed
from embodied_rl.models.base import PolicySpec
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import DaggerConfig
from embodied_rl.tasks.embodied_sft.run import EmbodiedSftRunner, EmbodiedSftWiring
from embodied_rl.tasks.wiring import RunContext
from embodied_rl.workers.collector import CollectSpaces, CollectWorker
from embodied_rl.workers.demonstrator import ImitationWorker

FOLDER: Final = "dagger"
"""Of the run directory: a data set for each round."""


class DaggerRunner(EmbodiedSftRunner):
    """Drives the four groups."""

    config: DaggerConfig  # type: ignore[assignment]
    collector: WorkerGroup
    backend: Backend
    spaces: CollectSpaces
    spec: PolicySpec

    def train_step(self, step: int) -> dict[str, float]:
        """A round where one is due; demonstrations, update."""
        number, since = divmod(step, self.config.dagger.interval)
        metrics: dict[str, float] = {}
        if not since and 0 < number <= self.config.dagger.rounds:
            metrics = self._round(number)
        # No step of after a round is read ahead of it.
        following = (number + 1) * self.config.dagger.interval
        self._ahead.end = self.config.runner.max_steps
        if number < self.config.dagger.rounds:
            self._ahead.end = min(following, self._ahead.end)
        return super().train_step(step) | metrics

    def restore(self, checkpoint: Path) -> None:
        """Read the rounds before the checkpoint again, and forget later ones: other weights may come to play them.

        Raises:
            CheckpointError: rounds before it are not in the run directory.
        """
        super().restore(checkpoint)
        section = self.config.dagger
        before = min((self.first_step - 1) // section.interval, section.rounds)
        collections = [self._collection(number) for number in range(1, before + 1)]
        if missing := [collection.root for collection in collections if not collection.played]:
            raise self._lacks(checkpoint, missing)
        due = self.first_step // section.interval
        for folder in sorted((self.run_dir / FOLDER).glob("round_*")):
            if int(folder.name.removeprefix("round_")) > due:
                self.say(f"{folder}: of a later step than {checkpoint.name}, it will be played again", "yellow")
                shutil.rmtree(folder)
        self._add(collections)

    def _lacks(self, checkpoint: Path, missing: list[Path]) -> CheckpointError:
        """The error for a checkpoint without rounds that it was trained on."""
        section, first = self.config.dagger, int(missing[0].name.removeprefix("round_"))
        return CheckpointError(
            f"{checkpoint}: expected the rounds that were played before it, with dagger.interval={section.interval} "
            f"and rounds={section.rounds}, in {self.run_dir / FOLDER}, which lacks "
            f"{listed(path.name for path in missing)}. Resume it in the directory of its run; or copy it as "
            f"<folder>/checkpoints/{checkpoint.name} and that run's {FOLDER} as <folder>/{FOLDER}; or set these keys "
            f"as they were; or resume a checkpoint of step {first * section.interval} or earlier, which plays them"
        )

    def _round(self, number: int) -> dict[str, float]:
        """Let the model play until the expert takes over, and add what that does to the demonstrations."""
        began, section = time.perf_counter(), self.config.dagger
        with self.progress.phase(f"dagger, round {number}"):
            self.saver.wait()
            # A run that resumes a checkpoint from elsewhere has none of its own yet.
            if self.saver.saved != self.saver.finished or not self._weights.exists():
                self.saver.save()
                self.saver.wait()
            collection = self._collection(number)
            jobs = plan(
                self.spaces.tasks,
                section,
                collection.outcomes(),
                first=(number - 1) * section.episodes_per_task,
                alone=section.beta**number,
            )
            self._play(jobs, collection.root)
            collection.publish(self.run_dir, str(self._weights))
            known, kept = collection.known(), collection.published()
            self._add([collection])
        succeeded = sum(facts.success for facts in known)
        self.say(
            f"dagger, round {number}: {succeeded} of {len(known)} episodes succeeded; {len(kept)} with "
            f"{sum(facts.length for facts in kept)} frames of the expert's are in {collection.root}"
        )
        assert self.demonstrations is not None
        return {
            "dagger/round": float(number),
            "dagger/success": succeeded / max(1, len(known)),
            "dagger/new_frames": float(sum(facts.length for facts in kept)),
            "dagger/frames": float(self.demonstrations.num_frames),
            "time/dagger": time.perf_counter() - began,
        }

    def _play(self, jobs: list[Job], folder: Path) -> None:
        if not jobs:
            return
        before = count_staged(folder).successes

        def follow(*_: object) -> None:  # a worker's report is of its own part
            self.progress.report("demonstrations", count_staged(folder).successes - before, len(jobs))

        self.backend.on_progress(follow)
        try:
            self.collector.call(CollectWorker.play, jobs, folder, self._weights).wait()
        finally:
            self.backend.on_progress(self.progress.hear)

    @property
    def _weights(self) -> Path:
        """The checkpoint that plays."""
        return checkpoint_dir(self.run_dir, self.saver.finished)

    def _collection(self, number: int) -> Collection:
        root = self.run_dir / FOLDER / f"round_{number:03d}"
        config = self.config
        return Collection(
            root=root, shapes=self.spaces.shapes, robot_type=config.env.env_type, noise=config.dagger.noise
        )

    def _add(self, collections: list[Collection]) -> None:
        """Let the readers have these data sets, too; a round may have left none."""
        if folders := [collection.root for collection in collections if collection.exists]:
            self.demonstrations = self.rollout.call(ImitationWorker.add, self.spec, folders).wait()[0]


class DaggerWiring(EmbodiedSftWiring):
    """Env, rollout, collector and actor groups, in this order."""

    config: DaggerConfig  # type: ignore[assignment]

    def connect(self) -> tuple[WorkerGroup, ...]:
        env, rollout, actor = super().connect()
        [collector] = self.backend.launch([self.group("collector", CollectWorker)])
        self._spaces: CollectSpaces | None = None
        if not self.config.runner.only_eval:
            self._spaces = spaces = collector.call(CollectWorker.setup).wait()[0]
            plan(spaces.tasks, self.config.dagger, {})  # a task with too few initial states is known now
        return env, rollout, collector, actor

    def describe(self) -> str:
        section = self.config.dagger
        rounds = min(section.rounds, (self.config.runner.max_steps - 1) // section.interval)
        least, most = section.takeover_after
        who = "the scripted expert" if section.scripted else f"teacher={section.teacher}"
        return (
            f"{super().describe()}; {rounds} rounds, every {section.interval} steps, of {section.episodes_per_task} "
            f"episodes a task, in which {who} takes over after {least} to {most} steps"
        )

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> DaggerRunner:
        env, rollout, collector, actor = groups
        runner = DaggerRunner(self.plan, env, rollout, actor, context)
        runner.demonstrations, runner.collector, runner.backend = self._demonstrations, collector, self.backend
        if text := evaluated_too(self.config.dagger, self.config.env.eval.episodes_per_task):
            context.say(text, "yellow")
        if self._spaces is not None:
            runner.spaces, runner.spec = self._spaces, self._spec
        return runner
