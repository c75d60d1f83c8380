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
save                                                                      => checkpoint
====================  =====================  ===========================  ==========================

With ``rollout.max_staleness`` 0 nobody acts while the actor updates.

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

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied_rl.contracts import EpisodeRecord, Spaces
from embodied_rl.envs.open_episodes import EnvState, OpenEpisode, read, write
from embodied_rl.evaluation.success import success_table
from embodied_rl.monitoring.builtin import logged_before
from embodied_rl.monitoring.trend import ENV_STEPS
from embodied_rl.plan import RunPlan
from embodied_rl.runtime.worker import Handle, WorkerGroup
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied.reporting import (
    EvalReporter,
    Rollout,
    rollout_metrics,
    task_metrics,
    warning,
)
from embodied_rl.tasks.loop import TrainingLoop
from embodied_rl.tasks.reporting import eval_name, longest, video_folder
from embodied_rl.tasks.wiring import RunContext, Wiring
from embodied_rl.workers.actor import ActorWorker
from embodied_rl.workers.env import EnvWorker, EvalReport
from embodied_rl.workers.rollout import RolloutWorker

_WITHOUT_EFFECT = ("name", "reward_coef", "use_rel_reward", "eval")
"""Keys of ``env`` that change no course of an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCalls:
    """A rollout under way."""

    interacted: Handle
    served: Handle

    def wait(self) -> Rollout:
        return Rollout(envs=self.interacted.wait(), policies=self.served.wait())


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
        self._open_episodes: list[OpenEpisode] = []
        """With auto-reset: where the finished training steps left the envs."""
        self._unreported: list[EpisodeRecord] = []
        """Episodes that ended and are in no metric yet."""

    def start_rollout(self, step: int, number: int = 0) -> RolloutCalls:
        """Start a rollout of all envs: of the step's rounds the one with this number."""
        wants_video = self.config.env.train.video_cfg.save_video and number == 0
        video_dir = self.train_video_dir / f"step_{step + 1:06d}" if wants_video else None
        first = number * self.config.algorithm.rollout_epoch
        return RolloutCalls(
            served=self.rollout.call(RolloutWorker.serve, mode="train", step=step, first_epoch=first),
            interacted=self.env.call(EnvWorker.interact, step=step, first_epoch=first, video_dir=video_dir),
        )

    def rollout_metrics(self, rounds: Sequence[Rollout], seconds: float) -> dict[str, float]:
        episodes = self._ended(rounds)
        self._open_episodes = [episode for report in rounds[-1].envs for episode in report.open_episodes]
        metrics = rollout_metrics(
            rounds,
            episodes=episodes,
            unfinished=len(self._open_episodes),
            steps_before=self.env_steps,
            rollout_s=seconds,
        )
        self.env_steps = metrics.get(ENV_STEPS)
        return metrics

    def _ended(self, rollouts: Sequence[Rollout]) -> Sequence[EpisodeRecord]:
        """The episodes that the step's metrics are made of: all that ended since the last ones that were."""
        ended = [*self._unreported, *(e for rollout in rollouts for report in rollout.envs for e in report.episodes)]
        report = reportable(ended, self.config.env.train.total_num_envs)
        self._unreported = [] if report else ended
        return ended if report else []

    def save_state(self, directory: Path) -> None:
        """With auto-reset the episodes under way."""
        if self._open_episodes:
            state = EnvState(
                episodes=self._open_episodes, unreported=self._unreported, settings=settings_of(self.config)
            )
            write(directory, state)

    def restore(self, checkpoint: Path) -> None:
        """With auto-reset bring the envs to where the checkpoint found them; say so where that cannot be."""
        if not self.config.env.train.auto_reset:
            return
        self.progress.describe("resuming envs")
        state = read(checkpoint)
        if state is None:
            self.say(
                f"every env starts a new episode: {checkpoint.name} was saved without env.train.auto_reset", "yellow"
            )
            return
        if changed := changes(state.settings, settings_of(self.config)):
            self.say(
                f"every env starts a new episode, as other settings make other ones: {'; '.join(changed)}", "yellow"
            )
            first = 1 + max(episode.number for episode in state.episodes)
            self.env.call(EnvWorker.resume, [], first_episode=first).wait()
            return
        resumed: list[list[int]] = self.env.call(EnvWorker.resume, state.episodes, first_episode=0).wait()
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

    def evaluate(self, step: int) -> float:
        """Every task's first initial states with the present policy: table, eval.json, videos, metrics."""
        start = time.perf_counter()
        video_dir = self.video_dir / eval_name(step) if self.config.evaluated.eval.video_cfg.save_video else None
        served = self.rollout.call(RolloutWorker.serve, mode="eval", step=step)
        reports: list[EvalReport] = self.env.call(EnvWorker.evaluate, video_dir=video_dir).wait()
        served.wait()
        table = success_table(episode for report in reports for episode in report.episodes)
        seconds = time.perf_counter() - start
        self.reporter.report(table, reports, step=step, seconds=seconds)
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
        self.logger.log(step, task_metrics(table), prefix="eval_task")
        by_suite = {f"{row.suite}/success": row.mean_task_success for row in table.suites}
        self.logger.log(step, by_suite, prefix="eval_suite")
        for path in (path for report in reports for path in report.videos):
            self.logger.log_video(step, f"eval/{path.stem}", path)
        return table.overall.success_rate

    def evaluation_work(self) -> float | None:
        cfg, train = self.config.evaluated.eval, self.config.env.train
        episodes: int = self.env.call(EnvWorker.count_evaluated).wait()[0]
        per_rollout = train.max_steps_per_rollout_epoch or train.max_episode_steps
        trained = train.total_num_envs * per_rollout * self.config.algorithm.rollout_epoch
        return episodes * cfg.max_episode_steps / trained

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        return warning(metrics, self.config)


class EmbodiedWiring(Wiring[EmbodiedConfig]):
    """Env, rollout and actor groups, in this order."""

    loop = EmbodiedRunner

    def connect(self) -> tuple[WorkerGroup, ...]:
        self.make_channels(lanes=True)
        env, rollout, actor = self.backend.launch(
            [self.group("env", EnvWorker), self.group("rollout", RolloutWorker), self.group("actor", ActorWorker)]
        )
        spaces: Spaces = env.call(EnvWorker.setup, train=not self.config.runner.only_eval).wait()[0]
        spec = self.spec(spaces)
        ready = [rollout.call(RolloutWorker.setup, spec), actor.call(ActorWorker.setup, spec)]
        for handle in ready:
            handle.wait()
        return env, rollout, actor

    def describe(self) -> str:
        train, size = self.config.env.train, self.config.algorithm.group_size
        lanes = self.plan.lanes
        return (
            f"{show_workers(self.plan)}; {train.total_num_envs} envs = {lanes.env_workers} workers x {lanes.stages} "
            f"stages x {train.total_num_envs // len(lanes.all())}, in {train.total_num_envs // size} groups of {size}"
        )


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


def settings_of(config: EmbodiedConfig) -> dict[str, Any]:
    """The keys, with values as JSON gives them back, that an env's course is a function of, beside its actions."""
    env = {key: value for key, value in asdict(config.env).items() if key not in _WITHOUT_EFFECT}
    train = {key: value for key, value in env.pop("train").items() if key != "video_cfg"}
    settings = {
        **{f"env.{key}": value for key, value in env.items()},
        **{f"env.train.{key}": value for key, value in train.items()},
        "algorithm.group_size": config.algorithm.group_size,
        "model.num_action_chunks": config.model.num_action_chunks,
    }
    settings.pop("env.train.max_steps_per_rollout_epoch")
    return json.loads(json.dumps(settings))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: before -> now`` for each that differs."""
    keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]
