"""The actor of ``algorithm.learner=sac``: puts rollouts into a replay buffer, and trains on what it draws from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl import checkpoints
from embodied_rl.algorithms.soft_q import chunk_outcomes
from embodied_rl.models.base import Policy, PolicySpec, require_reparameterized
from embodied_rl.monitoring.work import Flops
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.seeding import generator
from embodied_rl.training.optimizer import learning_rate_factor
from embodied_rl.training.replay import ReplayBuffer, Transitions
from embodied_rl.training.sac import SacUpdater, build_critics_optimizer
from embodied_rl.training.sharding import sum_over_ranks
from embodied_rl.training.soft_critics import SoftCritics
from embodied_rl.workers.actor import ActorWorker, place

if TYPE_CHECKING:
    from embodied_rl.demonstrations.outcomes import DemonstratedOutcomes


_FRAMES: Final = 64
"""Demonstrated frames that a policy looks at in one go."""


class ReplayActor(ActorWorker):
    """As its base class, but for what it makes of the rollouts that it receives."""

    def _prepare(self, spec: PolicySpec, mesh: DeviceMesh) -> Sequence[Policy]:
        policy, algorithm, seed = self._policy, self._algorithm, self._config.seed
        require_reparameterized(policy, self._model_config.model_type)
        self._blank = None  # nothing counts its operations
        critic = self._plan.config.critic.optim
        torch.manual_seed(seed)
        self._critics = SoftCritics.of(policy, algorithm.sac)
        self._critic_optimizer = build_critics_optimizer(self._critics, algorithm.sac, critic)
        trains = not self._plan.config.runner.only_eval
        if self._initial is not None and trains and checkpoints.shards.has_soft_critics(self._initial):
            checkpoints.shards.load_critic_weights(self._critics, self._initial)
            self._critics.fix_temperature()
        self._buffer = ReplayBuffer(algorithm.replay.capacity, gamma=algorithm.gamma, left_out=policy.decision_inputs)
        self._demonstrations = self._open_demonstrations(spec)
        self._shown: dict[str, Tensor] | None = None
        self._sac = SacUpdater(
            policy,
            self._critics,
            (self._optimizer, self._critic_optimizer),
            algorithm.sac,
            optim=(self._config.optim, critic),
            draw=self._draw,
            seed=seed,
            device=self.context.device,
            report_progress=self.context.report_progress,
        )
        return []

    def _extra_state(self) -> dict[str, Tensor]:
        return {}

    def _open_demonstrations(self, spec: PolicySpec) -> DemonstratedOutcomes | None:
        path, config = self._algorithm.replay.demonstrations, self._plan.config
        if path is None or config.runner.only_eval:
            return None
        from embodied_rl.demonstrations.fit import camera_features, kept_to
        from embodied_rl.demonstrations.outcomes import DemonstratedOutcomes  # imports pyarrow

        assert isinstance(config, EmbodiedConfig)  # the rules refuse other tasks
        return DemonstratedOutcomes(
            path,
            config.env,
            chunk=spec.num_action_chunks,
            cameras=camera_features(kept_to(path), spec.image_shapes),
            sizes=spec.image_shapes,
            state=spec.state_dim > 0,
            report=self.context.report_progress,
        )

    def _see(self, demonstrations: DemonstratedOutcomes) -> dict[str, Tensor]:
        """Of each frame the part of ``replay_inputs`` that tells what was seen. No training changes it; weights that
        are loaded do."""
        if self._shown is not None:
            return self._shown
        spec, frames, found = self._policy.spec, torch.arange(demonstrations.num_frames), []
        shape = (spec.num_action_chunks, spec.action_dim)
        for part in frames.split(_FRAMES):
            obs = demonstrations.observations(part)
            with torch.no_grad():
                inputs = self._policy.demonstration(obs, torch.zeros(len(part), *shape))
            found.append({name: t.cpu() for name, t in inputs.items() if name not in self._policy.decision_inputs})
            self.context.report_progress("demonstrations", int(part[-1]) + 1, len(frames))
        self._shown = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        return self._shown

    def _update(self, step: int) -> dict[str, float]:
        self._received.sort(key=place)  # however the messages came in
        staleness = self._staleness(step)
        rollouts, self._received = self._received, []
        before = self._buffer.total
        with self._timer.phase("buffer"):
            for trajectory in rollouts:
                self._buffer.add(trajectory)
        came = self._buffer.total - before
        updates = range(*map(self._algorithm.replay.updates_after, (before, self._buffer.total)))
        factor = learning_rate_factor(step, self._config.lr_sched, total_steps=self._plan.config.runner.max_steps)
        self._policy.train()
        with self._timer.phase("update"):
            warm_up = step < self._algorithm.critic_warmup_steps
            metrics = self._sac.run(updates, learning_rate_factor=factor, critics_alone=warm_up)
            self._policy.update_statistics(rollouts, sum_over_ranks(self.context.device))
        return {
            **metrics,
            **staleness,
            "samples": float(came),
            "score": torch.cat([t.scores for t in rollouts]).mean().item(),
            "buffer_chunks": float(len(self._buffer)),
            "learning_rate": self._config.optim.lr * factor,
        }

    def count_chunks(self) -> int:
        """Chunks that came so far, also those that the buffer has no room for any more."""
        return self._buffer.total

    def _draw(self, number: int) -> Transitions:
        """The batch of an update."""
        replay, shown = self._algorithm.replay, self._demonstrations
        rng = generator(self._config.seed, number)
        count = 0 if shown is None else round(replay.demonstration_share * replay.batch_size)
        batch = self._buffer.sample(torch.from_numpy(rng.integers(len(self._buffer), size=replay.batch_size - count)))
        if shown is None or not count:
            return batch
        return Transitions.concatenate([batch, self._demonstrated(shown, rng.integers(len(shown), size=count))])

    def _demonstrated(self, demonstrations: DemonstratedOutcomes, index: NDArray[np.int64]) -> Transitions:
        frames, actions, rewards, valid, terminated, following = demonstrations.sample(torch.from_numpy(index))
        returns, discounts = chunk_outcomes(rewards, valid, terminated, gamma=self._algorithm.gamma)
        seen = self._see(demonstrations)
        return Transitions(
            inputs={name: tensor[frames] for name, tensor in seen.items()},
            actions=actions,
            rewards=returns,
            discounts=discounts,
            next_inputs={name: tensor[following] for name, tensor in seen.items()},
        )

    def _without_gradient(self) -> tuple[str, ...]:
        return ()

    def _flops(self) -> dict[str, Flops]:
        return {}

    def _snapshot(self, contents: Sequence[str]) -> Callable[[Path], None]:
        return self._buffer.snapshot() if "optimizer" in contents else super()._snapshot(contents)

    def load(self, directory: Path, *, weights_only: bool) -> None:
        super().load(directory, weights_only=weights_only)
        self._shown = None
        if not weights_only:
            self._critics.fix_temperature()
            self._buffer.load(directory)

    def _trained_critic(self, *, with_optimizer: bool) -> checkpoints.shards.Trained | None:
        if self._plan.config.runner.only_eval:
            return None
        return self._critics, self._critic_optimizer if with_optimizer else None
