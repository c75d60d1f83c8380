"""The rollout worker of imitation: it acts in evaluations, and between them it reads demonstrations for the actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from embodied_rl.contracts import Delivery, EnvObs
from embodied_rl.demonstrations.augmentation import augment, reword
from embodied_rl.demonstrations.dataset import (
    Demonstrations,
    demonstration_trajectory,
    frames_of_step,
    mixed_frames_of_step,
    together,
)
from embodied_rl.demonstrations.fit import camera_features, check_data, spaces_of
from embodied_rl.demonstrations.mixture import shares_of
from embodied_rl.evaluation.views import Views, spread
from embodied_rl.models.base import ActionStatistics, PolicySpec
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import WorkerContext
from embodied_rl.schema import EmbodiedSftConfig
from embodied_rl.seeding import derived_seed
from embodied_rl.workers.rollout import RolloutWorker
from embodied_rl.workers.trajectory import split_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSummary:
    """The demonstrations to imitate, in numbers."""

    num_frames: int
    num_episodes: int
    action_statistics: ActionStatistics
    views: Views | None = None
    """What the episodes of the first data sets begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationReport:
    """A worker's report on a training step's demonstrations."""

    samples: int
    """Samples that this worker sent."""
    seconds: dict[str, float]
    """Phase -> wall seconds."""


class ImitationWorker(RolloutWorker):
    """Each worker sends to every ``world_size``-th actor rank, so each rank gets one message a training step, and its
    messages come in the order of the steps however far ahead the workers read.
    """

    def __init__(self, context: WorkerContext, plan: RunPlan[EmbodiedSftConfig], channels: Channels) -> None:
        super().__init__(context, plan, channels)
        self._data = plan.config.data

    def open(self, spec: PolicySpec) -> DemonstrationSummary:
        """Open the data set and see that it fits the env.

        Raises:
            UserError: as :func:`check_data`, or a video is damaged.
        """
        # The plan looked at what was known of the env before it was built.
        check_data(self._data, spaces_of(spec))
        self._parts = [
            self._read(path, spec, camera_features(self._data, spec.image_shapes)) for path in self._data.paths
        ]
        return replace(self._summary(), views=Views.merged(map(_views, self._parts)))

    def add(self, spec: PolicySpec, folders: Sequence[Path]) -> DemonstrationSummary:
        """Take data sets that ``task=collect`` or its like has written since, with the env's own cameras, too."""
        self._parts += [self._read(folder, spec, None) for folder in folders]
        return self._summary()

    def _read(self, path: Path | str, spec: PolicySpec, cameras: Mapping[str, str] | None) -> Demonstrations:
        report, clip = self.context.report_progress, self._data.clip_actions
        return Demonstrations.of_policy(path, spec, cameras=cameras, clip_actions=clip, report=report)

    def _summary(self) -> DemonstrationSummary:
        self._demonstrations = together(self._parts)
        return DemonstrationSummary(
            num_frames=self._demonstrations.num_frames,
            num_episodes=self._demonstrations.num_episodes,
            action_statistics=_statistics(self._demonstrations.action_statistics),
        )

    async def demonstrate(self, *, step: int) -> DemonstrationReport:
        """Send this worker's actor ranks their samples of a training step."""
        data, rank, world = self._data, self.context.rank, self.context.world_size
        positions = torch.arange(data.batch_size)
        positions = positions[positions % self._actor_ranks % world == rank]
        if len(positions):
            with self._timer.phase("data"):
                obs, actions, valid = self._demonstrations.sample(self._frames(step)[positions])
                trajectory = demonstration_trajectory(
                    positions=positions,
                    replay_inputs=self._replay_inputs(self._augmented(self._move(obs), step, positions), actions, step),
                    valid=valid,
                    action_dim=actions.shape[-1],
                    policy_version=self._weights.version,
                )
            for receiver, part in enumerate(split_by_rank(trajectory, self._actor_ranks)):
                if part is not None:
                    await self._trajectories.put(Delivery(step=step, trajectory=part), key=receiver)
        return DemonstrationReport(samples=len(positions), seconds=self._timer.drain())

    def _frames(self, step: int) -> torch.Tensor:
        """[batch_size] int64: all workers' frames of a training step."""
        data, found = self._data, self._demonstrations
        if data.weights is None:
            return frames_of_step(found.num_frames, seed=data.seed, step=step, batch_size=data.batch_size)
        folders = len(data.paths)
        sizes = [part.num_frames for part in self._parts[:folders]]
        if added := sum(part.num_frames for part in self._parts[folders:]):
            sizes.append(added)
        shares = shares_of(data.weights[: len(sizes)], data.batch_size)
        return mixed_frames_of_step(sizes, shares, seed=data.seed, step=step)

    def _augmented(self, obs: EnvObs, step: int, positions: torch.Tensor) -> EnvObs:
        data, changes = self._data, self._data.augmentation
        at: Any = {"seed": data.seed, "step": step, "positions": positions, "batch_size": data.batch_size}
        return replace(
            obs,
            images=augment(obs.images, changes, **at),
            instructions=reword(obs.instructions, changes.words, **at),
        )

    @torch.inference_mode()
    def _replay_inputs(self, obs: EnvObs, actions: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
        device = self.context.device
        seed = derived_seed(self._data.seed, step, 2, self.context.rank)
        generator = torch.Generator(device).manual_seed(seed)
        inputs = self.policy.demonstration(obs, actions.to(device), generator)
        return {key: tensor.cpu() for key, tensor in inputs.items()}


def _views(part: Demonstrations) -> Views:
    """Of a data set's cameras, spread over its episodes."""
    obs, _, _ = part.sample(torch.from_numpy(spread(part.first_frames)))
    return Views.of({camera: images.numpy() for camera, images in obs.images.items()})


def _statistics(found: Mapping[str, Any]) -> ActionStatistics:
    return ActionStatistics(**{field.name: tuple(map(float, found[field.name])) for field in fields(ActionStatistics)})
