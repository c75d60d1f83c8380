"""What every task's wiring gives the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.channel.base import Channel
from embodied_rl.checkpoints.store import initial_weights
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.progress import Progress
from embodied_rl.runtime.placement import Placement
from embodied_rl.runtime.worker import Backend, GroupSpec, WorkerGroup
from embodied_rl.schema import Config, EmbodiedConfig, MathConfig
from embodied_rl.tasks.rules.staleness import staleness_bound
from embodied_rl.tasks.saving import CheckpointSaver
from embodied_rl.workers.actor import ActorWorker

BUCKETS_IN_FLIGHT = 2
"""Of the weights, to each receiver: one is written while another is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a training loop is given beside its configuration and its workers."""

    run_dir: Path
    first_step: int
    """Finished training steps of the weights that the run starts with."""
    checkpoint: str | None
    """Where the weights came from, relative to its run's directory; None: trained here or initialised."""
    resumed: Path | None
    """The checkpoint that the run goes on from, weights, optimiser and all; None: it starts, or only evaluates."""
    logger: MetricLogger
    progress: Progress
    console: Console


class Runner(Protocol):
    """The loop of a task."""

    @property
    def saver(self) -> CheckpointSaver | None:
        """None where nothing is trained."""
        ...

    def run(self) -> None:
        """Do the whole job: train, evaluate only, or what the task is."""
        ...


C = TypeVar("C", bound=Config)


class Wiring(Generic[C]):
    """One task: its worker groups, the channels between them, and its loop."""

    trajectories: Channel
    """From :meth:`connect` on: what the actor's ranks wait for, keyed by rank."""

    def connect(self, config: C, backend: Backend) -> tuple[WorkerGroup, ...]:
        """Start the groups, joined by channels, each set up and ready. The actor is the last."""
        raise NotImplementedError

    def describe(self, config: C, groups: tuple[WorkerGroup, ...]) -> str:
        """The arithmetic of the run that was derived and not asked for."""
        raise NotImplementedError

    def runner(self, config: C, groups: tuple[WorkerGroup, ...], context: RunContext) -> Runner:
        """The loop that drives the groups."""
        raise NotImplementedError


def group(component: str, worker: type, placement: Placement, config: Config, **arguments: object) -> GroupSpec:
    """One component's workers where the configuration places them; ``arguments`` go to their constructor."""
    return GroupSpec(
        name=f"{component.capitalize()}Group",
        worker=worker,
        arguments=arguments,
        devices=[placement.device(component, rank) for rank in range(placement.world_size(component))],
        num_threads=config.cluster.num_threads[component],
    )


def actor_group(
    placement: Placement,
    config: Config,
    *,
    expected: int,
    groups: int,
    longest_sequence: int,
    trajectories: Channel,
    weights: Channel,
) -> GroupSpec:
    """The actor's ranks; what is not of the configuration is as in :class:`ActorWorker`."""
    return group(
        "actor",
        ActorWorker,
        placement,
        config,
        model=config.model,
        algorithm=config.algorithm,
        actor=config.actor,
        expected=expected,
        groups=groups,
        longest_sequence=longest_sequence,
        total_steps=config.runner.max_steps,
        staleness_bound=staleness_bound(config),
        initial=initial_weights(config),
        rollout_workers=placement.world_size("rollout"),
        trajectories=trajectories,
        weights=weights,
    )


def trajectory_capacity(config: EmbodiedConfig | MathConfig, senders: int) -> int:
    """Messages that each actor rank's lane of trajectories must hold: the next of each sender, or where rollouts run
    ahead all there may be.

    Whoever runs ahead must be able to hand over all that it has: weights come to it only when it is done, and the actor
    gives them before it takes the next trajectories.
    """
    ahead = config.rollout.max_staleness
    # One more, for the mark that there will be no others.
    return senders * config.algorithm.rollout_epoch * (1 + ahead) + 1 if ahead else senders


def values_per_chunk(config: Config, num_action_chunks: int) -> int:
    """V, what a policy's value head gives for a chunk: nothing where the estimator needs no values."""
    if not ADVANTAGES[config.algorithm.adv_type].needs_values:
        return 0
    return 1 if config.algorithm.reward_type == "chunk_level" else num_action_chunks
