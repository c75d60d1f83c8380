"""What tasks that act in envs have in common: lanes, their channels, and what the workers at both ends are given."""

from __future__ import annotations

from typing import Any

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.channel.base import Channel
from embodied_rl.contracts import Spaces
from embodied_rl.models.base import PolicySpec
from embodied_rl.runtime.worker import Backend, GroupSpec
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.task import BUCKETS_IN_FLIGHT, group, values_per_chunk
from embodied_rl.tasks.validation import placement_of
from embodied_rl.workers.env import EnvWorker
from embodied_rl.workers.lanes import Lanes

LANE_CAPACITY = 4
"""A lane has at most a turn and the marks of its rollouts' ends in flight."""


class Simulation:
    """Makes the channels; the groups are the caller's to launch."""

    def __init__(self, config: EmbodiedConfig, backend: Backend) -> None:
        self._config = config
        self.placement = placement_of(config)
        self.actor_ranks = self.placement.world_size("actor")
        self.lanes = Lanes(env_workers=self.placement.world_size("env"), stages=config.rollout.pipeline_stage_num)
        self.turns = backend.channel("turns", self.lanes.all(), LANE_CAPACITY)
        self.answers = backend.channel("answers", self.lanes.all(), LANE_CAPACITY)
        self.weights = backend.channel("weights", range(self.placement.world_size("rollout")), BUCKETS_IN_FLIGHT)

    def env_group(self) -> GroupSpec:
        config = self._config
        return group(
            "env",
            EnvWorker,
            self.placement,
            config,
            env=config.env,
            group_size=config.algorithm.group_size,
            rollout_epochs=config.algorithm.rollout_epoch,
            num_action_chunks=config.model.num_action_chunks,
            needs_values=ADVANTAGES[config.algorithm.adv_type].needs_values,
            lanes=self.lanes,
            turns=self.turns,
            answers=self.answers,
        )

    def serving(self, trajectories: Channel) -> dict[str, Any]:
        """The arguments of a :class:`~embodied_rl.workers.rollout.RolloutWorker`."""
        config = self._config
        return {
            "model": config.model,
            "sampling": config.algorithm.sampling_params,
            "seed": config.actor.seed,
            "lanes": self.lanes,
            "turns": self.turns,
            "answers": self.answers,
            "trajectories": trajectories,
            "actor_ranks": self.actor_ranks,
            "weights": self.weights,
            "enable_offload": config.rollout.enable_offload,
            "interruptible": config.rollout.interruptible,
        }

    def spec(self, spaces: Spaces) -> PolicySpec:
        """What the policy must fit."""
        chunk = self._config.model.num_action_chunks
        return PolicySpec(
            action_dim=spaces.action_dim,
            num_action_chunks=chunk,
            state_dim=spaces.state_dim,
            image_shapes=spaces.image_shapes,
            values_per_chunk=values_per_chunk(self._config, chunk),
        )
