"""Workers and groups of them, independent of how they run.

A :class:`Worker` is a class with a life cycle; a :class:`WorkerGroup` is its ranks, addressed together. A *backend*
(``serial.py``, ``process.py``; the latter on one node or, by ``cluster.py``, on several) makes groups and channels,
delivers calls and brings back results or failures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from embodied_rl.errors import UserError
from embodied_rl.runtime.cores import Pinning
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.trace import Trace

if TYPE_CHECKING:  # channels import torch; a worker's process reads this before it may
    from embodied_rl.channel.base import Channel


class WorkerError(RuntimeError):
    """A worker raised or died. The message has the worker's name and its traceback or exit signal."""


class StallError(WorkerError):
    """No worker has shown a sign of life for too long."""


class WorkersLost(WorkerError):
    """Expendable workers failed, died or hung; the message says how. The others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """What a worker does. Producer: backends, for calls and answers, and workers. Consumer: the progress display."""

    worker: str
    what: str | None
    """Name of the call, or of the work within it; None: it has answered its last call."""
    done: int = 0
    total: int = 0
    """0: nobody knows."""
    fraction: float | None = None
    """Share of the work that is done, in time; None: done / total."""


class ReportProgress(Protocol):
    """A worker's way to say how far long work is; also a sign of life."""

    def __call__(self, what: str, done: int, total: int, fraction: float | None = None) -> None: ...


def _ignore_progress(what: str, done: int, total: int, fraction: float | None = None) -> None:
    del what, done, total, fraction


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """A worker's identity. Built by the backend, given to the worker's constructor."""

    group: str
    rank: int
    world_size: int
    device: str
    """torch device, ``cpu`` or ``cuda:<index>``."""
    num_threads: int
    """CPU threads for torch and the numerical libraries."""
    rendezvous: str
    """A file that the group's ranks share, or ``tcp://host:port`` of rank 0's node: for ``torch.distributed``."""
    trace: Trace = field(default_factory=lambda: Trace(""))
    report_progress: ReportProgress = field(default=_ignore_progress)
    numerics: Numerics = field(default_factory=Numerics)
    pinning: Pinning | None = None
    """None: all cores that the run has."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the worker's process beside those of the command."""

    @property
    def name(self) -> str:
        return f"{self.group}[{self.rank}]"


class Worker:
    """Base class. Methods that exchange messages over channels are coroutines; all others are ordinary.

    The constructor only stores: a worker still in it may be killed without :meth:`close`. A ``setup`` method of the
    worker's own builds what is slow (models, simulators).
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def close(self) -> None:
        """Release everything; called once, also after an error. A worker's process ends here, without atexit hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group to launch: one worker per device."""

    name: str
    worker: Callable[..., Worker]
    """Called as ``worker(context, **arguments)`` in each rank."""
    arguments: Mapping[str, Any]
    devices: Sequence[str]
    num_threads: int
    slots: Sequence[int] = ()
    """Of each worker, which node it is on; empty: all are here."""
    pinnings: Sequence[Pinning] = ()
    """Of each worker; empty: they have all cores."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """As :attr:`WorkerContext.environment`."""
    expendable: bool = False
    """A worker that is lost can be replaced (:meth:`WorkerGroup.replace`): its loss is :class:`WorkersLost`."""
    timeout: float | None = None
    """Seconds without a sign of life after which an expendable worker that waits for nobody is lost."""


class UserFailure(UserError):
    """A :class:`UserError` that a worker raised: its message is all the user needs."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """In a channel instead of a message: whoever waits for one shall give up and return, since the run ends."""


class GivenUp(Exception):  # no error
    """Raised within a worker that got :class:`Abandoned`, and caught by its call."""


class Handle(Protocol):
    """Results to come of a call to all ranks of a group."""

    def wait(self) -> list[Any]:
        """One result per rank, in rank order.

        Raises:
            WorkerError: any worker of the run failed, not only one of this group.
            UserError: a worker refused its input.
        """
        ...


class WorkerGroup(Protocol):
    """All ranks of one kind of worker."""

    name: str
    world_size: int

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """Start ``method`` (of the worker's class, e.g. ``ActorWorker.update``) in every rank, with equal arguments.

        Raises:
            WorkersLost: a worker of the group is lost; nothing was started.
        """
        ...

    def settle(self) -> None:
        """Wait until no worker of the group has a call under way, and forget the results."""
        ...

    def retire(self, most: int) -> list[str]:
        """End the workers that hold more than so many bytes of memory, while no call is under way; :meth:`replace`
        starts others. Returns who they were, with their figures."""
        ...

    def replace(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """Start new workers in the place of those that are lost, and call ``method`` in each; returns their number."""
        ...


class Backend(Protocol):
    """A way to run workers."""

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int] = ()) -> Channel:
        """A channel for the workers of this run. Make channels before the groups that use them.

        Args:
            readers: for each key the slot (:class:`~embodied_rl.runtime.placement.Placement`) of the one worker that
                takes its messages; empty: all are on one node.
        """
        ...

    def launch(self, specs: Sequence[GroupSpec]) -> list[WorkerGroup]:
        """Start all workers. Returns at once; the first call waits for the start."""
        ...

    def on_progress(self, callback: Callable[[WorkerProgress], None]) -> None:
        """Tell ``callback`` of every call, of its answer, and of workers' reports between."""
        ...

    def abandon(self, channel: Channel, keys: Sequence[Hashable]) -> None:
        """Let workers that wait for a message of ``channel`` return, so that they can answer a last call before the
        shutdown: under each of ``keys`` they get :class:`Abandoned`. What other workers do is of no interest any more.
        """
        ...

    def check_shared(self, folder: str, key: str) -> None:
        """Raise UserError unless all nodes of the run have the same folder there.

        Args:
            key: the setting that it comes from.
        """
        ...

    def loads(self) -> list[Load]:
        """How busy each node of the run is, and each worker on it; the driver is one of the first node."""
        ...

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that have processes of their own on this machine, by name."""
        ...

    def shutdown(self) -> None:
        """Close every worker and channel. Safe to call twice, and after any failure; leaves no process behind."""
        ...
