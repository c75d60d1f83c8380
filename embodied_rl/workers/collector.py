"""The collecting worker: plays episodes with an expert or a policy and writes them down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from embodied_rl.checkpoints import shards as checkpoint
from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.expert import make_expert
from embodied_rl.demonstrations.lerobot.episode import EpisodeFacts, stage
from embodied_rl.demonstrations.lerobot.metadata import Shapes
from embodied_rl.demonstrations.plan import Attempt, Job, share
from embodied_rl.demonstrations.play import ExpertPlayer, Noise, Player, play
from embodied_rl.envs import render_device
from embodied_rl.envs.base import SimEnv, SimObs, adapter_class
from embodied_rl.envs.reset_states import task_ranges
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import policy_of
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import Worker, WorkerContext
from embodied_rl.schema import CollectConfig

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

    def __init__(self, context: WorkerContext, plan: RunPlan[CollectConfig], channels: Channels) -> None:
        super().__init__(context)
        del channels  # it writes files
        self._plan, self._initial = plan, plan.start.initial
        self._env, self._collect, self._model = plan.config.env, plan.config.collect, plan.config.model
        self._sim: SimEnv | None = None

    def setup(self) -> CollectSpaces:
        """Build the env, and the expert or policy that plays in it."""
        render_device.use(self.context.device)
        adapter = adapter_class(self._env.env_type)
        self._sim = sim = adapter(1, self._plan.env_params, self._env.seed)  # type: ignore[call-arg]  # every adapter's signature
        if getattr(sim, "action_choices", ()):
            raise UserError(
                f"task=collect records continuous actions, and the actions of env={self._env.name} are choices; use "
                "an env with continuous ones"
            )
        self._shapes = Shapes(
            cameras=dict(sim.image_shapes),
            state_dim=sim.state_dim,
            action_dim=sim.action_dim,
            fps=sim.control_hz,
            videos=self._collect.image_format == "video",
        )
        self._player = self._build_player(sim)
        return CollectSpaces(shapes=self._shapes, tasks=task_ranges(sim, self._env.task_ids))

    def play(self, jobs: Sequence[Job]) -> None:
        """Play this worker's share of all workers' ``jobs``; the episodes go to the data set's staging folder."""
        mine = share(jobs, self.context.rank, self.context.world_size)
        for done, job in enumerate(mine):
            for attempt in job.attempts:
                success = self._play(attempt)
                self.context.report_progress("episode", done, len(mine))
                if success:
                    break

    def close(self) -> None:
        if self._sim is not None:
            self._sim.close()

    def _play(self, attempt: Attempt) -> bool:
        """Play an episode and write it down; returns whether it succeeded."""
        assert self._sim is not None
        cfg = self._collect
        own, of_noise = attempt.generators(cfg.seed)
        steps = play(
            self._sim,
            attempt.reset_state_id,
            self._player,
            generator=own,
            noise=Noise(cfg.noise, cfg.noise_correlation, of_noise, self._sim.action_dim),
            max_steps=cfg.max_episode_steps,
            on_step=self._report_step,
        )
        facts = EpisodeFacts(
            task_id=attempt.task_id,
            demonstration=attempt.demonstration,
            attempt=attempt.number,
            reset_state_id=attempt.reset_state_id,
            instruction=self._sim.task(attempt.reset_state_id).instruction,
            success=bool(steps.success[-1]),
            length=len(steps.success),
        )
        kept = facts.success or cfg.keep_failures
        stage(Path(cfg.path), facts, steps if kept else None, fps=self._shapes.fps, videos=self._shapes.videos)
        return facts.success

    def _report_step(self, step: int) -> None:
        if step % _REPORT_EVERY == 0:
            self.context.report_progress("step", step, self._collect.max_episode_steps)

    def _build_player(self, sim: SimEnv) -> Player:
        cfg = self._collect
        if cfg.policy == "expert":
            expert = make_expert(sim, self._env.env_type, cfg.expert, cfg.expert_params)
            return ExpertPlayer(expert, varied=cfg.expert_noise)
        spec = PolicySpec(
            action_dim=sim.action_dim,
            num_action_chunks=self._model.num_action_chunks,
            state_dim=sim.state_dim,
            image_shapes=sim.image_shapes,
            values_per_chunk=0,
        )
        torch.manual_seed(self._collect.seed)
        initial = self._initial
        with_adapters = initial is not None and checkpoint.has_adapters(initial)

        def load(policy: Policy) -> None:
            if initial is not None:
                checkpoint.load_weights(policy, initial)

        policy = policy_of(self._model, spec, None if with_adapters else load)
        if with_adapters:
            load(policy)
        policy.to(self.context.device).eval().requires_grad_(False)
        return _PolicyPlayer(policy, self._collect.temperature, self.context.device)


class _PolicyPlayer:
    """A policy that decides on a chunk of actions, executes it, and looks again."""

    def __init__(self, policy: Policy, temperature: float, device: str) -> None:
        self._policy, self._temperature, self._device = policy, temperature, device
        self._left: list[NDArray[np.float32]] = []

    def start(self, generator: np.random.Generator) -> None:
        self._generator = torch.Generator(self._device).manual_seed(int(generator.integers(2**63)))
        self._left = []

    @torch.inference_mode()
    def act(self, obs: SimObs, instruction: str) -> NDArray[np.float32]:
        if not self._left:
            seen = EnvObs(
                env_ids=torch.zeros(1, dtype=torch.int64, device=self._device),
                images={camera: torch.from_numpy(image).to(self._device) for camera, image in obs.images.items()},
                state=torch.from_numpy(obs.state).to(self._device),
                instructions=(instruction,),
            )
            output = self._policy.act(
                seen,
                greedy=self._temperature == 0.0,
                temperature=self._temperature or 1.0,
                generator=self._generator,
            )
            chunk = output.actions[0].float().cpu().numpy()
            if not np.isfinite(chunk).all():
                raise UserError("collect: the policy's actions are NaN or infinite; use other weights")
            self._left = list(chunk)
        return self._left.pop(0)
