"""The loop of ``task=embodied``, and its wiring.

One step; ``=>`` is a message, a column waits where it has nothing to do:

====================  =====================  ===========================  ==========================
runner                env workers            rollout workers              actor ranks
====================  =====================  ===========================  ==========================
publish, load                                load weights v               => weights v
interact, serve,      reset, => turn         <= turn, act, => answer      receive: waits
receive               step, => turn ...      for the next stage ...       <= trajectories, one by one
                                             => trajectories
update                steps for later steps  acts for later steps         advantages, update
                      or resets
save                                                                      => checkpoint
====================  =====================  ===========================  ==========================

With ``rollout.max_staleness`` 0 nobody acts while the actor updates; envs are reset for the next rollout.

============  ===============  ===============  ==============================================
channel       from             to               key
============  ===============  ===============  ==============================================
turns         env worker       rollout worker   lane: (env worker, stage)
answers       rollout worker   env worker       lane
trajectories  rollout workers  actor rank       actor rank
weights       actor rank 0     rollout worker   rollout worker
============  ===============  ===============  ==============================================
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied_rl.algorithms.catalog import LEARNERS
from embodied_rl.contracts import EpisodeRecord, Spaces
from embodied_rl.envs.open_episodes import EnvState, OpenEpisode, read, write
from embodied_rl.envs.task_sampling import TaskSuccess
from embodied_rl.evaluation.success import SuccessTable, success_table
from embodied_rl.monitoring.builtin import logged_before
from embodied_rl.monitoring.performance import Waits
from embodied_rl.monitoring.trend import ENV_STEPS
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import GroupSpec, Handle, Worker, WorkerGroup, WorkersLost
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.due import evaluates_after
from embodied_rl.tasks.embodied.recovery import EnvRecovery, RolloutCalls, recovers
from embodied_rl.tasks.embodied.reporting import (
    EvalReporter,
    Rollout,
    episodes_of,
    rollout_metrics,
    task_metrics,
    waits,
    warning,
)
from embodied_rl.tasks.embodied.settings import changes, settings_of
from embodied_rl.tasks.embodied.views import PolicyViews
from embodied_rl.tasks.loop import TrainingLoop
from embodied_rl.tasks.reporting import eval_name, longest, video_folder
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker, EvalReport
from embodied_rl.workers.rollout import Mode, RolloutWorker


class EmbodiedRunner(TrainingLoop[EmbodiedConfig]):
    """Drives the three groups."""

    rollout_worker = RolloutWorker

    def __init__(
        self,
        plan: RunPlan[EmbodiedConfig],
        env: WorkerGroup,
        rollout: WorkerGroup,
        actor: WorkerGroup,
        context: RunContext,
    ) -> None:
        super().__init__(plan, rollout, actor, context)
        config, start, self.env = plan.config, plan.start, env
        run = f"{config.runner.experiment_name}_{context.run_dir.name}"
        self.video_dir = video_folder(config, context.run_dir)
        """Folder of evaluations' videos."""
        self.train_video_dir = Path(config.env.train.video_cfg.video_base_dir) / run
        self.reporter = EvalReporter(
            config=config,
            run_dir=context.run_dir,
            video_dir=self.video_dir,
            console=context.console,
            checkpoint=context.checkpoint,
            first_step=start.step,
        )
        self.env_steps = logged_before(context.run_dir, ENV_STEPS, start.step) if start.step else 0.0
        """Simulator steps of training so far; None: nobody knows."""
        self.views = PolicyViews(start, config.model, context.run_dir, context.say)
        self.recovery: EnvRecovery | None = None
        """None: the loss of an env worker ends the run."""
        self._task_success = TaskSuccess() if config.env.train.task_sampling == "success" else None
        """None: what succeeds does not decide what is played."""
        self._preparing: Handle | None = None
        """The call for the envs to be ready for the next rollout, if that was made."""
        self._open_episodes: list[OpenEpisode] = []
        """With auto-reset: where the finished training steps left the envs."""
        self._first_episode = 0
        """With auto-reset: the number of the episodes that envs begin with, where no training step has left them."""
        self._unreported: list[EpisodeRecord] = []
        """Episodes that ended and are in no metric yet."""
        self._chunks = 0.0
        """With a replay buffer: the chunks that came in the finished training steps."""

    @property
    def syncs_within(self) -> bool:
        return super().syncs_within or self.config.rollout.chunks_ahead is not None

    def start_rollout(self, step: int, number: int = 0) -> RolloutCalls:
        """Start a rollout of all envs: of the step's rounds the one with this number."""
        wants_video = self.config.env.train.video_cfg.save_video and number == 0
        video_dir = self.train_video_dir / f"step_{step + 1:06d}" if wants_video else None
        first = number * self.config.algorithm.rollout_epoch
        weights = self._task_success.weights() if self._task_success else None
        at_random = self.plan.replays and self._chunks < self.config.algorithm.replay.random_chunks
        prepared, self._preparing = self._preparing, None
        return RolloutCalls(
            lambda again: (
                self.rollout.call(
                    RolloutWorker.serve,
                    mode="train",
                    step=step,
                    first_epoch=first,
                    at_random=at_random,
                    again=again,
                ),
                self.env.call(
                    EnvWorker.interact, step=step, first_epoch=first, video_dir=video_dir, task_weights=weights
                ),
            ),
            self.recovery,
            prepared,
        )

    def run_ahead(self, step: int, rounds: Sequence[Rollout]) -> None:
        """As the base. Where no rollout may begin yet, envs are reset for it: where they start follows from the step
        and, with sampling by success, from the rollouts that are complete."""
        super().run_ahead(step, rounds)
        train, done = self.config.env.train, step + 1
        if (
            self.max_staleness
            or train.auto_reset
            or train.enable_offload  # then what the simulators hold is the actor's meanwhile
            or train.video_cfg.save_video  # of the first frame, too
            or done == self.config.runner.max_steps
            or evaluates_after(self.config.runner, done)  # which needs the env workers first
        ):
            return
        weights = None
        if self._task_success:
            success = copy.deepcopy(self._task_success)  # of the last finished step, for a checkpoint
            success.add(episodes_of(rounds))
            weights = success.weights()
        with suppress(WorkersLost):  # said again when the rollout begins
            self._preparing = self.env.call(EnvWorker.prepare, step=done, task_weights=weights)

    def rollout_metrics(self, rounds: Sequence[Rollout], seconds: float) -> dict[str, float]:
        self.views.see(rounds[0].envs, training=True)
        episodes = self._ended(rounds)
        if self._task_success:
            self._task_success.add(episodes)
        self._open_episodes = [episode for report in rounds[-1].envs for episode in report.open_episodes]
        metrics = rollout_metrics(
            rounds,
            episodes=episodes,
            unfinished=len(self._open_episodes),
            steps_before=self.env_steps,
            rollout_s=seconds,
        )
        self.env_steps = metrics.get(ENV_STEPS)
        if self.recovery is not None and self.recovery.restarts:
            metrics["env/restarts"] = float(self.recovery.restarts)
        if self.recovery is not None and self.recovery.recycled:
            metrics["env/recycled"] = float(self.recovery.recycled)
        return metrics

    def train_step(self, step: int) -> dict[str, float]:
        metrics = super().train_step(step)
        if self.plan.replays:
            self._chunks += metrics["actor/samples"]
        return metrics

    def waits(self, rounds: Sequence[Rollout]) -> Waits:
        return waits(rounds)

    def _ended(self, rollouts: Sequence[Rollout]) -> Sequence[EpisodeRecord]:
        """The episodes that the step's metrics are made of: all that ended since the last ones that were."""
        ended = [*self._unreported, *episodes_of(rollouts)]
        report = reportable(ended, self.config.env.train.total_num_envs)
        self._unreported = [] if report else ended
        return ended if report else []

    def open_episodes(self) -> tuple[Sequence[OpenEpisode], int]:
        """With auto-reset: where the last finished training step left the envs; and where none has, the number of the
        episodes that they begin with."""
        return self._open_episodes, self._first_episode

    def save_state(self, directory: Path) -> None:
        """What the policy learned from; with auto-reset the episodes under way, with sampling by success that of each
        task."""
        self.views.write(directory)
        if self._task_success:
            self._task_success.write(directory)
        if self._open_episodes:
            state = EnvState(
                episodes=self._open_episodes, unreported=self._unreported, settings=settings_of(self.config)
            )
            write(directory, state)

    def restore(self, checkpoint: Path) -> None:
        """With auto-reset bring the envs to where the checkpoint found them; say so where that cannot be. With sampling
        by success, go on with that of each task; where the checkpoint has none, all tasks begin alike. With a replay
        buffer count what it has had."""
        if self.plan.replays:
            learner: Any = LEARNERS[self.config.algorithm.learner].load()
            self._chunks = float(self.actor.call(learner.count_chunks).wait()[0])
        if self._task_success:
            self._task_success = TaskSuccess.read(checkpoint) or self._task_success
        if not self.config.env.train.auto_reset:
            return
        self.progress.describe("resuming envs")
        state = read(checkpoint)
        if state is None:
            self.say(
                f"every env starts a new episode: {checkpoint.name} was saved without env.train.auto_reset", "yellow"
            )
            return
        if changed := changes(state.settings, self.config):
            self.say(
                f"every env starts a new episode, as other settings make other ones: {'; '.join(changed)}", "yellow"
            )
            self._first_episode = 1 + max(episode.number for episode in state.episodes)
            self._resume([], first_episode=self._first_episode)
            return
        resumed = self._resume(state.episodes, first_episode=0)
        astray = sum(len(env_ids) for env_ids in resumed)
        self._unreported = list(state.unreported)
        self._open_episodes = list(state.episodes)
        if astray:
            self.say(
                f"{astray} of {len(state.episodes)} envs did not come to the very state where the checkpoint left "
                "them when their actions were repeated, as on another machine or version of the simulator: they go on "
                "from where that led",
                "yellow",
            )

    def _resume(self, episodes: Sequence[OpenEpisode], first_episode: int) -> list[list[int]]:
        """As :meth:`EnvWorker.resume` of all workers, also where some are lost in it."""
        while True:
            try:
                resumed = self.env.call(EnvWorker.resume, episodes, first_episode=first_episode).wait()
            except WorkersLost as lost:
                if self.recovery is None:
                    raise
                self.recovery.recover(lost)
            else:
                if self.recovery is not None:
                    self.recovery.succeeded()
                return resumed

    def evaluate(self, step: int) -> float:
        """Every task's first initial states with the present policy: table, eval.json, videos, metrics."""
        start, cfg = time.perf_counter(), self.config.evaluated.eval
        reports = self._played("eval", step, self.video_dir / eval_name(step) if cfg.video_cfg.save_video else None)
        table = _success(reports)
        sampled = _success(self._played("eval_sampled", step, None)) if cfg.sampled else None
        seconds = time.perf_counter() - start
        self.reporter.report(table, reports, sampled, step=step, seconds=seconds)
        self.views.see(reports, training=False)
        self.logger.log(
            step,
            {
                "success_rate": table.overall.success_rate,
                "mean_task_success": table.mean_task_success,
                "episodes": table.overall.episodes,
                "return": table.overall.mean_return,
                "seconds": seconds,
                "wait_seconds": longest(reports, "wait"),
                **({} if sampled is None else {"sampled_success_rate": sampled.overall.success_rate}),
            },
            prefix="eval",
        )
        self.logger.log(step, task_metrics(table), prefix="eval_task")
        by_suite = {f"{row.suite}/success": row.mean_task_success for row in table.suites}
        self.logger.log(step, by_suite, prefix="eval_suite")
        for path in (path for report in reports for path in report.videos):
            self.logger.log_video(step, f"eval/{path.stem}", path)
        return table.overall.success_rate

    def _played(self, mode: Mode, step: int, video_dir: Path | None) -> Sequence[EvalReport]:
        """The workers' reports of an evaluation's episodes."""
        calls = RolloutCalls(
            lambda again: (
                self.rollout.call(RolloutWorker.serve, mode=mode, step=step, again=again),
                self.env.call(EnvWorker.evaluate, video_dir=video_dir),
            ),
            self.recovery,
        )
        return calls.wait().envs  # type: ignore[return-value]  # nothing was given up

    def evaluation_work(self) -> float | None:
        cfg, train = self.config.evaluated.eval, self.config.env.train
        episodes: int = self.env.call(EnvWorker.count_evaluated).wait()[0]
        per_rollout = train.max_steps_per_rollout_epoch or train.max_episode_steps
        trained = train.total_num_envs * per_rollout * self.config.algorithm.rollout_epoch
        return (1 + cfg.sampled) * episodes * cfg.max_episode_steps / trained

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        return warning(metrics, self.config)


class EmbodiedWiring(Wiring[EmbodiedConfig]):
    """Env, rollout and actor groups, in this order."""

    loop = EmbodiedRunner

    def connect(self) -> tuple[WorkerGroup, ...]:
        self.make_channels(lanes=True)
        env, rollout, actor = self.backend.launch(
            [
                self.group("env", EnvWorker),
                self.group("rollout", RolloutWorker),
                self.group("actor", LEARNERS[self.config.algorithm.learner].load()),
            ]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=not self.config.runner.only_eval).wait()[0]
        spec = self.spec(spaces)
        ready = [rollout.call(RolloutWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return env, rollout, actor

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> EmbodiedRunner:
        env, rollout, actor = groups
        runner = EmbodiedRunner(self.plan, env, rollout, actor, context)
        if recovers(self.config):
            runner.recovery = EnvRecovery(
                wiring=self, env=env, rollout=rollout, open_episodes=runner.open_episodes, context=context
            )
        return runner

    def group(self, component: str, worker: Callable[..., Worker]) -> GroupSpec:
        spec = super().group(component, worker)
        if component != "env" or not recovers(self.config):
            return spec
        return dataclasses.replace(spec, expendable=True, timeout=self.config.env.worker_timeout)

    def describe(self) -> str:
        train, size = self.config.env.train, self.config.algorithm.group_size
        lanes = self.plan.lanes
        return (
            f"{show_workers(self.plan)}; {train.total_num_envs} envs = {lanes.env_workers} workers x {lanes.stages} "
            f"stages x {train.total_num_envs // len(lanes.all())}, in {train.total_num_envs // size} groups of {size}"
        )


def _success(reports: Sequence[EvalReport]) -> SuccessTable:
    return success_table(episode for report in reports for episode in report.episodes)


def show_workers(plan: RunPlan[Any]) -> str:
    """Number of workers of each component, in words."""
    counts = [f"{plan.world_size(component)} {component}" for component in ("env", "rollout", "actor")]
    return f"{', '.join(counts)} worker(s)"


def reportable(ended: Sequence[EpisodeRecord], num_envs: int) -> bool:
    """Whether each env ended an episode among ``ended``.

    Where episodes are longer than rollouts, those that end within a few of them are the quick ones, which succeeded. So
    metrics are made of the episodes of so many rollouts that every env is among them, with its failures.
    """
    return len({episode.env_id for episode in ended}) == num_envs
