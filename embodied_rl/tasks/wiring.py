"""Base of every task's wiring: who talks to whom, and which loop drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from rich.console import Console

from embodied_rl.contracts import Spaces
from embodied_rl.models.base import PolicySpec
from embodied_rl.monitoring.metrics import MetricLogger
from embodied_rl.monitoring.progress import Progress
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.cores import pinnings
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.trace import DRIVER, Trace
from embodied_rl.runtime.worker import Backend, GroupSpec, Worker, WorkerGroup
from embodied_rl.schema import Config
from embodied_rl.tasks.hooks import Hooks
from embodied_rl.tasks.saving import CheckpointSaver
from embodied_rl.workers.weight_lending import answers_to

LANE_CAPACITY = 6
"""A lane has at most a turn, the marks of its rollouts' ends, and one that it is given up in flight; and a process that
is killed may take one place along."""
BUCKETS_IN_FLIGHT = 2
"""Buffers of weights on their way to each receiver: one is written while another is read."""
_GROUP = "Group"
"""End of a group's name, after its component's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Surroundings of a training loop: where it writes and what it tells of itself."""

    run_dir: Path
    checkpoint: str | None
    """Name of the checkpoint that the weights came from; None: trained here or initialised."""
    logger: MetricLogger
    progress: Progress
    console: Console
    hooks: Hooks = field(default_factory=Hooks)
    begins: Callable[[], None] = lambda: None
    """To be called when nothing can refuse the run any more."""
    trace: Trace = field(default_factory=lambda: Trace(DRIVER))
    loads: Callable[[], list[Load]] = list
    """How busy each node is."""

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line, which the console does not break."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class Runner(Protocol):
    """The loop of a task."""

    @property
    def saver(self) -> CheckpointSaver | None:
        """None where nothing is trained."""
        ...

    def run(self) -> None:
        """Do the whole job: train, evaluate only, or what the task is."""
        ...


def component_of(process: str) -> str:
    """The component of a worker, or the driver, by its name."""
    return process.partition(f"{_GROUP}[")[0].lower()


C = TypeVar("C", bound=Config)


class Wiring(Generic[C]):
    """One task: its worker groups, the channels between them, and its loop."""

    loop: ClassVar[Callable[..., Runner]]
    """Constructed with the plan, the groups in the order of :meth:`connect`, and the context."""

    def __init__(self, plan: RunPlan[C], backend: Backend) -> None:
        self.plan, self.config, self.backend = plan, plan.config, backend
        self.channels = Channels()
        """From :meth:`connect` on."""

    def connect(self) -> tuple[WorkerGroup, ...]:
        """Start the groups, joined by channels, each set up and ready. The actor is the last."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for the console: the arithmetic of the run that was derived and not asked for."""
        raise NotImplementedError

    def runner(self, groups: tuple[WorkerGroup, ...], context: RunContext) -> Runner:
        """The loop that drives the groups."""
        return self.loop(self.plan, *groups, context)

    def group(self, component: str, worker: Callable[..., Worker]) -> GroupSpec:
        """One component's workers where the configuration places them."""
        placement = self.plan.placement
        return GroupSpec(
            name=f"{component.capitalize()}{_GROUP}",
            worker=worker,
            arguments={"plan": self.plan, "channels": self.channels},
            devices=[placement.device(component, rank) for rank in range(placement.world_size(component))],
            num_threads=self.plan.threads[component],
            slots=placement.slots[component],
            pinnings=pinnings(self.config.cluster, placement, component),
            environment=self.config.cluster.env_vars.get(component, {}),
        )

    def make_channels(self, *, lanes: bool = False) -> None:
        """Make the channels to and from the actor and, with ``lanes``, those between envs and policy."""
        plan, make, slots = self.plan, self.backend.channel, self.plan.placement.slots
        all_lanes, actor, rollout = plan.lanes.all(), slots["actor"], slots["rollout"]
        lenders = range(len(actor)) if plan.weight_plane == "cuda_ipc" else ()
        self.channels = Channels(
            turns=make("turns", all_lanes, LANE_CAPACITY, [rollout[rank % len(rollout)] for rank, _ in all_lanes])
            if lanes
            else None,
            answers=make("answers", all_lanes, LANE_CAPACITY, [slots["env"][rank] for rank, _ in all_lanes])
            if lanes
            else None,
            trajectories=make("trajectories", range(len(actor)), plan.arithmetic.capacity, actor),
            weights=make(
                "weights",
                [*range(len(rollout)), *map(answers_to, lenders)],
                BUCKETS_IN_FLIGHT,
                [*rollout, *(actor[rank] for rank in lenders)],
            ),
        )

    def spec(self, spaces: Spaces) -> PolicySpec:
        """Shapes that the policy must fit."""
        return PolicySpec(
            action_dim=spaces.action_dim,
            num_action_chunks=self.plan.arithmetic.num_action_chunks,
            state_dim=spaces.state_dim,
            image_shapes=spaces.image_shapes,
            action_choices=spaces.action_choices,
            values_per_chunk=self.plan.policy_values,
        )
