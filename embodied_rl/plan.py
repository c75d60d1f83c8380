"""The plan of a run: everything that follows from its configuration, worked out once and handed to all workers.

``python train.py plan ...`` prints it. :func:`embodied_rl.tasks.planning.plan_of` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import Config, ModelConfig

if TYPE_CHECKING:  # channels import torch
    from embodied_rl.channel.base import Channel

C = TypeVar("C", bound=Config, covariant=True)

WeightPlane = Literal["channel", "collective", "cuda_ipc"]
Lane = tuple[int, int]
"""(env worker's rank, stage): the key of its messages in the channels of turns and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins."""

    step: int = 0
    """Finished training steps of the weights that it starts with."""
    resumed: Path | None = None
    """The checkpoint that it goes on from, weights, optimiser and all, or that it evaluates."""
    initial: Path | None = None
    """The checkpoint whose weights are its beginning, or its reference policy's (``runner.init_from``); None: fresh
    ones, or a folder's."""
    began_with: Path | None = None
    """The checkpoint whose weights were its beginning, needed or not."""
    recovered: bool = False
    """The same command has run before, up to a failure: what it did up to ``step`` is not done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Who serves whom. A *lane* is one pipeline stage of one env worker: the unit that waits for the policy at once."""

    env_workers: int
    stages: int

    def all(self) -> list[Lane]:
        """Ordered by env worker, then stage; a lane's index is also the order of its envs' ids."""
        return [(rank, stage) for rank in range(self.env_workers) for stage in range(self.stages)]

    def index(self, lane: Lane) -> int:
        return lane[0] * self.stages + lane[1]

    def env_ids(self, lane: Lane, total_num_envs: int) -> range:
        """The lane's part of ``total_num_envs``, which divides evenly (checked with the config)."""
        per_lane = total_num_envs // (self.env_workers * self.stages)
        return range(self.index(lane) * per_lane, (self.index(lane) + 1) * per_lane)

    def served_by(self, rollout_rank: int, rollout_workers: int) -> list[list[Lane]]:
        """The lanes of one rollout worker, by stage: it serves every ``rollout_workers``-th env worker."""
        ranks = range(rollout_rank, self.env_workers, rollout_workers)
        return [[(rank, stage) for rank in ranks] for stage in range(self.stages)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The numbers of a training step."""

    groups: int
    """Groups that a step is made for, over all actor ranks."""
    group_size: int
    chunks: int
    """Decisions of one member of a group: chunks of a rollout; 1 for a completion or a demonstration."""
    num_action_chunks: int
    """C: actions, or tokens, of a decision."""
    senders: int
    """Trajectory messages that each actor rank gets in a rollout epoch."""
    rollout_epochs: int = 1
    capacity: int
    """Messages that each actor rank's lane of trajectories must hold."""

    @property
    def samples(self) -> int:
        """Samples of a step, one a decision, at most: episodes may end early, groups may be filtered."""
        return self.groups * self.group_size * self.chunks

    @property
    def messages(self) -> int:
        """Trajectory messages that each actor rank gets in a rollout."""
        return self.senders * self.rollout_epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Generic[C]):
    """One run, worked out."""

    config: C
    start: Start
    placement: Placement
    threads: Mapping[str, int]
    """Component -> threads of each of its workers."""
    lanes: Lanes
    """Without env workers there are none."""
    training: Arithmetic | None
    """None: nothing is trained (``task=collect``)."""
    staleness_bound: int | None
    """How many updates older than the present weights those may be that made a trajectory; None: no policy made it."""
    weight_plane: WeightPlane
    """The way of the weights: ``actor.sync_backend``, or what the placement makes of ``auto``."""
    values_per_chunk: int
    """V, the values of a chunk, of the policy's value head or of a critic of its own; 0: there are none."""
    model_params: Any
    """``model.params`` as the model's ``Params``."""
    env_params: Any = None
    """``env.init_params`` as the adapter's ``Params``; None without env."""
    eval_env_params: Any = None
    """The same of the env of evaluations."""
    critic: ModelConfig | None = None
    """The model of a critic of its own; None: there is none."""
    critic_params: Any = None
    """Its options as the model's ``Params``."""
    replays: bool = False
    """Training is on a replay buffer."""

    @property
    def records_unacted(self) -> bool:
        """States on which nobody acts are recorded: what values them, or remembers them, is in the actor."""
        return self.trained_critic is not None or self.replays

    @property
    def policy_values(self) -> int:
        """What the policy's value head gives for a chunk; 0: it has none."""
        return self.values_per_chunk if self.critic is None else 0

    @property
    def trained_critic(self) -> ModelConfig | None:
        """:attr:`critic` of a run that does not evaluate alone."""
        return None if self.config.runner.only_eval else self.critic

    @property
    def arithmetic(self) -> Arithmetic:
        """:attr:`training` of a task that trains."""
        assert self.training is not None
        return self.training

    def world_size(self, component: str) -> int:
        """How many workers a component has."""
        return self.placement.world_size(component)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The channels of a run, made by the task; None where it has no such messages."""

    turns: Channel | None = None
    """Env worker to rollout worker, keyed by lane."""
    answers: Channel | None = None
    """Rollout worker to env worker, keyed by lane."""
    trajectories: Channel | None = None
    """To the actor, keyed by its rank."""
    weights: Channel | None = None
    """From the actor, keyed by rollout rank."""

    @staticmethod
    def need(channel: Channel | None) -> Channel:
        """``channel``, which the worker cannot do without."""
        assert channel is not None
        return channel
