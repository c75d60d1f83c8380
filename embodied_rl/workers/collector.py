"""The collecting worker: plays episodes with an expert or a policy and writes them down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodied_rl.demonstrations.expert import make_expert
from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, stage
from embodied_rl.demonstrations.lerobot.metadata import Shapes
from embodied_rl.demonstrations.plan import Attempt, Job, section_name, share
from embodied_rl.demonstrations.play import Bursts, ExpertPlayer, Noise, Player, play, succeeded
from embodied_rl.envs import render_device
from embodied_rl.envs.base import SimEnv, adapter_class
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.errors import UserError
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import Worker, WorkerContext
from embodied_rl.schema import CollectConfig, DaggerConfig, PlaySection
from embodied_rl.workers.players import PolicyPlayer, Takeover, model_policy, teacher_policy

_REPORT_EVERY = 5
"""Control steps between two reports of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSpaces:
    """The env's observations and tasks."""

    shapes: Shapes
    tasks: dict[int, range]
    """Task id -> its initial states."""


class CollectWorker(Worker):
    """Plays in one env slot, one episode after the other."""

    def __init__(
        self, context: WorkerContext, plan: RunPlan[CollectConfig] | RunPlan[DaggerConfig], channels: Channels
    ) -> None:
        super().__init__(context)
        del channels  # it writes files
        config = plan.config
        self._env_params, self._env, self._model = plan.env_params, config.env, config.model
        self._section: PlaySection = config.collect if isinstance(config, CollectConfig) else config.dagger
        self._demonstrates = not isinstance(config, CollectConfig) or config.collect.policy == "expert"
        self._keep_failures = isinstance(config, CollectConfig) and config.collect.keep_failures
        self._sim: SimEnv | None = None

    def setup(self) -> CollectSpaces:
        """Build the env, and who demonstrates in it."""
        render_device.use(self.context.device)
        adapter = adapter_class(self._env.env_type)
        self._sim = sim = adapter(1, self._env_params, self._env.seed)  # type: ignore[call-arg]  # every adapter's signature
        if getattr(sim, "action_choices", ()):
            raise UserError(
                f"task=collect records continuous actions, and the actions of env={self._env.name} are choices; use "
                "an env with continuous ones"
            )
        if nested := [camera for camera in sim.image_shapes if "/" in camera]:
            names = ", ".join(f"{camera.replace('/', '_')}: {camera}" for camera in sim.image_shapes)
            raise UserError(
                f"cameras of env={self._env.name}: got {', '.join(nested)}, expected names without slashes, since "
                "LeRobot's features have none; name all cameras, as env=gymnasium can: "
                f"'env.init_params.images={{{names}}}'"
            )
        self._shapes = Shapes(
            cameras=dict(sim.image_shapes),
            state_dim=sim.state_dim,
            action_dim=sim.action_dim,
            fps=sim.control_hz,
            videos=self._section.image_format == "video",
            disturbed=self._section.noise_bursts is not None,
        )
        self._demonstrator = self._expert(sim) if self._demonstrates else None
        return CollectSpaces(shapes=self._shapes, tasks=task_ranges(sim, self._env.task_ids))

    def play(self, jobs: Sequence[Job], folder: Path, weights: Path | None) -> None:
        """Play this worker's share of all workers' ``jobs``.

        Args:
            folder: the data set, to whose staging folder the episodes go.
            weights: a checkpoint of the model, where that plays; None: it has those of ``model.path``.
        """
        assert self._sim is not None
        learner: Player | None = None
        if self._section.learner_plays:
            policy = model_policy(self._model, self._sim, weights, self._section.seed)
            learner = PolicyPlayer(policy, self._section.temperature, self.context.device)
        mine = share(jobs, self.context.rank, self.context.world_size)
        for done, job in enumerate(mine):
            for attempt in job.attempts:
                success = self._play(self._sim, attempt, folder, learner)
                self.context.report_progress("episode", done, len(mine))
                if success:
                    break

    def close(self) -> None:
        if self._sim is not None:
            self._sim.close()

    def _play(self, sim: SimEnv, attempt: Attempt, folder: Path, learner: Player | None) -> bool:
        """Play an episode and write it down; returns whether it succeeded."""
        section, player = self._section, self._demonstrator or learner
        assert player is not None
        if attempt.takeover:
            assert learner is not None
            player = Takeover(learner, player, attempt.takeover)
        own, of_noise = attempt.generators(section.seed)
        played = play(
            sim,
            attempt.reset_state_id,
            player,
            generator=own,
            noise=_noise(section, of_noise, sim.action_dim),
            max_steps=section.max_episode_steps,
            on_step=self._report_step,
        )
        steps = played.since(attempt.takeover)
        success = succeeded(sim, played, use_rel_reward=self._env.use_rel_reward)
        facts = EpisodeFacts(
            task_id=attempt.task_id,
            demonstration=attempt.demonstration,
            attempt=attempt.number,
            reset_state_id=attempt.reset_state_id,
            instruction=sim.task(attempt.reset_state_id).instruction,
            success=success,
            length=0 if steps is None else len(steps.success),
        )
        kept = steps if success or self._keep_failures else None
        stage(folder, facts, kept, fps=self._shapes.fps, videos=self._shapes.videos)
        return success

    def _report_step(self, step: int) -> None:
        if step % _REPORT_EVERY == 0:
            self.context.report_progress("step", step, self._section.max_episode_steps)

    def _expert(self, sim: SimEnv) -> Player:
        section = self._section
        if section.teacher is not None:
            policy = teacher_policy(section.teacher, sim, f"{section_name(section)}.teacher")
            return PolicyPlayer(policy, section.temperature, self.context.device)
        expert = make_expert(sim, self._env.env_type, section.expert, section.expert_params)
        return ExpertPlayer(expert, varied=section.expert_noise)


def _noise(section: PlaySection, generator: np.random.Generator, size: int) -> Noise | Bursts:
    """Of an episode, with ``size`` numbers an action."""
    if section.noise_bursts is None:
        return Noise(section.noise, section.noise_correlation, generator, size)
    steps, pause = section.noise_bursts
    return Bursts(section.noise, steps, pause, generator, size)
