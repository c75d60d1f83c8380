"""``task=collect``: workers play side by side what is missing, then it goes into the data set.

There are no channels: the workers write what they play to one folder.
"""

from __future__ import annotations

import datetime
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import yaml

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.demonstrations.lerobot import metadata, writer
from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, StagedEpisode, count_staged, staged
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.demonstrations.plan import CONFIG, Job, plan
from embodied_rl.errors import UserError
from embodied_rl.evaluation.success import SuccessReport, success_table
from embodied_rl.extras import versions
from embodied_rl.files import locked, parse_json, write_json, write_text
from embodied_rl.runtime.worker import Backend, WorkerGroup
from embodied_rl.schema import CollectConfig
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.collector import CollectSpaces, CollectWorker

_PROVENANCE: Final = "meta/provenance.json"
_PACKAGES: Final = ("torch", "numpy", "av", "mujoco", "robosuite", "mani-skill", "transformers")


@dataclass(slots=True, kw_only=True)
class CollectRunner:
    """Drives the env group."""

    config: CollectConfig
    context: RunContext
    env: WorkerGroup
    backend: Backend
    spaces: CollectSpaces
    saver: None = field(default=None, init=False)
    """Nothing is trained."""

    @property
    def root(self) -> Path:
        """The data set."""
        return Path(self.config.collect.path)

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
            write_text(self.root / CONFIG, yaml.safe_dump(asdict(self.config), sort_keys=False))
            published = self._published()
            outcomes = {(f.task_id, f.demonstration, f.attempt): f.success for f in self._known(published)}
            jobs = plan(self.spaces.tasks, self.config.collect, outcomes)
            try:
                self._play(jobs)
            except (KeyboardInterrupt, SystemExit):
                count = count_staged(self.root).successes
                self.context.say(
                    f"{count} finished demonstrations wait in {self.root}; the same command resumes from there"
                )
                raise
            self.context.progress.describe("writing the data set")
            self._publish(published)
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
            self.env.call(CollectWorker.play, jobs).wait()
            follow()

    def _published(self) -> list[EpisodeFacts]:
        """The episodes that the data set has."""
        if not (self.root / metadata.INFO).exists():
            return []
        return [
            EpisodeFacts(instruction=record["tasks"][0], **{name: record[name] for name in (*writer.FACTS, "length")})
            for record in DataSet.open(self.root).episodes()
        ]

    def _known(self, published: list[EpisodeFacts]) -> list[EpisodeFacts]:
        """Every attempt whose outcome is known, each once."""
        found = {facts.name: facts for facts in (*published, *(episode.facts for episode in staged(self.root)))}
        return [found[name] for name in sorted(found)]

    def _publish(self, published: list[EpisodeFacts]) -> None:
        """Put the staged episodes into the data set, and forget them."""
        there = {facts.name for facts in published}
        waiting = [episode for episode in staged(self.root) if episode.kept]
        new = [episode for episode in waiting if episode.facts.name not in there]
        if not new and not published:
            raise UserError(
                f"none of {len(staged(self.root))} attempts succeeded, so there is nothing to keep. Raise "
                "collect.max_episode_steps or collect.max_attempts, lower collect.noise, or let another policy play; "
                f"with other settings give another collect.path than {self.root}"
            )
        if new:
            writer.append(self.root, new, self.spaces.shapes, robot_type=self.config.env.env_type)
            self._note_provenance(new, first=len(published))
        for episode in waiting:
            shutil.rmtree(episode.folder)

    def _note_provenance(self, new: list[StagedEpisode], first: int) -> None:
        """Add to the list of the runs that the episodes came from."""
        path = self.root / _PROVENANCE
        runs = parse_json(path.read_text()) if path.exists() else []
        model = self.config.collect.policy == "model"
        runs.append(
            {
                "episodes": [first, first + len(new)],
                "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                "run_directory": str(self.context.run_dir),
                "command": sys.argv,
                "weights": (self.config.runner.init_from or self.config.model.path) if model else None,
                "python": sys.version.split()[0],
                "packages": versions(*_PACKAGES),
            }
        )
        write_json(path, runs)

    def _report(self) -> None:
        """Print what was collected, over all runs."""
        published = self._published()
        known = self._known(published)
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
        wanted = self.config.collect.episodes_per_task
        for task_id in self.spaces.tasks:
            got = sum(facts.success for facts in published if facts.task_id == task_id)
            if got < wanted:
                self.context.say(
                    f"task {task_id} has {got} of {wanted} demonstrations; raise collect.max_attempts for more",
                    "yellow",
                )
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
        player = "the scripted expert" if collect.policy == "expert" else f"model={self.config.model.model_type}"
        return (
            f"{self.plan.world_size('env')} env worker(s); {player} plays {tasks} task(s) x "
            f"{collect.episodes_per_task} demonstrations = {tasks * collect.episodes_per_task}"
        )

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> CollectRunner:
        [env] = groups
        return CollectRunner(
            config=self.config,
            context=context,
            env=env,
            backend=self.backend,
            spaces=self._spaces,
        )
