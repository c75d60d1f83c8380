"""``task=collect``: workers play side by side what is missing, then it goes into the data set.

There are no channels: the workers write what they play to one folder.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.collection import Collection
from embodied_rl.demonstrations.lerobot.episode import count_staged, staged
from embodied_rl.demonstrations.plan import CONFIG, WEIGHTS, Job, evaluated_too, plan
from embodied_rl.errors import UserError
from embodied_rl.evaluation.success import SuccessReport, success_table
from embodied_rl.files import locked, write_json, write_text
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import CollectConfig
from embodied_rl.tasks.collect.rules import checkpoints_that_play
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.collector import CollectSpaces, CollectWorker


@dataclass(slots=True, kw_only=True)
class CollectRunner:
    """Drives the env group."""

    config: CollectConfig
    context: RunContext
    env: WorkerGroup
    backend: Backend
    spaces: CollectSpaces
    initial: Path | None
    """Checkpoint of the model that plays; None: it has the weights of ``model.path``, or none plays."""
    saver: None = field(default=None, init=False)
    """Nothing is trained."""

    @property
    def root(self) -> Path:
        """The data set."""
        return Path(self.config.collect.path)

    @property
    def collection(self) -> Collection:
        config = self.config
        return Collection(
            root=self.root, shapes=self.spaces.shapes, robot_type=config.env.env_type, noise=config.collect.noise
        )

    def run(self) -> None:
        """Collect, or resume collecting, until every task has its demonstrations.

        Raises:
            UserError: another run collects to the same folder, or nothing that was played is worth keeping.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.root / ".lock", wait=False))
            except BlockingIOError:
                raise UserError(
                    f"collect.path: another run is collecting to {self.root}; wait for it, or give another folder"
                ) from None
            if not (self.root / WEIGHTS).exists():
                playing = checkpoints_that_play(self.config)
                write_json(self.root / WEIGHTS, {key: asdict(played) for key, played in playing.items()})
            write_text(self.root / CONFIG, yaml.safe_dump(asdict(self.config), sort_keys=False))
            before = self.collection
            jobs = plan(self.spaces.tasks, self.config.collect, before.outcomes(), played=before.states())
            try:
                self._play(jobs)
            except (KeyboardInterrupt, SystemExit):
                count = count_staged(self.root).successes
                self.context.say(
                    f"{count} finished demonstrations wait in {self.root}; the same command resumes from there"
                )
                raise
            self.context.progress.describe("writing the data set")
            self._publish()
        self.context.progress.advance()
        self._report()

    def _play(self, jobs: list[Job]) -> None:
        """Let the workers play ``jobs``."""
        if not jobs:
            return
        before = count_staged(self.root)
        with self.context.progress.phase("demonstrations"):

            def follow(*_: object) -> None:  # a worker's report is of its own part
                now = count_staged(self.root)
                successes = now.successes - before.successes
                self.context.progress.report("demonstrations", successes, len(jobs))
                self.context.progress.describe(f"{now.failures - before.failures} failed")

            self.backend.on_progress(follow)
            self.env.call(CollectWorker.play, jobs, self.root, self.initial).wait()
            follow()

    def _publish(self) -> None:
        """Put the staged episodes into the data set."""
        collect = self.config.collect
        weights = self.config.runner.init_from or self.config.model.path if collect.learner_plays else None
        if not self.collection.publish(self.context.run_dir, collect.teacher or weights):
            raise UserError(
                f"none of {len(staged(self.root))} attempts left anything to keep: none succeeded, or none needed the "
                "expert. Raise collect.max_episode_steps or collect.max_attempts, lower collect.noise, or let another "
                f"policy play; with other settings give another collect.path than {self.root}"
            )

    def _report(self) -> None:
        """Print what was collected, over all runs."""
        published, known = self.collection.published(), self.collection.known()
        records = [
            EpisodeRecord(
                env_id=0,
                task_id=facts.task_id,
                instruction=facts.instruction,
                reset_state_id=facts.reset_state_id,
                success=facts.success,
                episode_return=float(facts.success),
                episode_length=facts.length,
            )
            for facts in known
        ]
        self.context.console.print(SuccessReport(success_table(records), title=f"attempts, {self.config.env.name}"))
        collect, hint = self.config.collect, "raise collect.max_attempts for more"
        if collect.takeover_after is not None:
            hint += "; where the learner succeeds alone nothing is to be shown: take over earlier, or ask for more"
        if not collect.varies:
            hint += ", or set collect.noise: without it an initial state is for one attempt, and none may be left"
        for task_id in self.spaces.tasks:
            got = sum(facts.success for facts in published if facts.task_id == task_id)
            if got < (wanted := collect.episodes_per_task):
                self.context.say(f"task {task_id} has {got} of {wanted} demonstrations; {hint}", "yellow")
        size = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file() and not _hidden(path))
        frames = sum(facts.length for facts in published)
        self.context.say(f"data set: {self.root}, {len(published)} episodes, {frames} frames, {size / 2**20:.1f} MiB")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class CollectWiring(Wiring[CollectConfig]):
    """The env group alone."""

    def connect(self) -> tuple[WorkerGroup, ...]:
        [env] = self.backend.launch([self.group("env", CollectWorker)])
        self._spaces: CollectSpaces = env.call(CollectWorker.setup).wait()[0]
        return (env,)

    def describe(self) -> str:
        collect, tasks = self.config.collect, len(self._spaces.tasks)
        model = f"model={self.config.model.model_type}"
        player = "the scripted expert" if collect.scripted else f"teacher={collect.teacher}"
        if collect.policy == "model":
            player = model
        elif collect.takeover_after is not None:
            player = f"{model}, then {player},"
        return (
            f"{self.plan.world_size('env')} env worker(s); {player} plays {tasks} task(s) x "
            f"{collect.episodes_per_task} demonstrations = {tasks * collect.episodes_per_task}"
        )

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> CollectRunner:
        [env] = groups
        if text := evaluated_too(self.config.collect, self.config.env.eval.episodes_per_task):
            context.say(text, "yellow")
        return CollectRunner(
            config=self.config,
            context=context,
            env=env,
            backend=self.backend,
            spaces=self._spaces,
            initial=self.plan.start.initial,
        )
