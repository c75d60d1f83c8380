"""Where workers run: starts their processes, makes the channels between them. :class:`LocalHost` is this node.

Supervision (``process.py``) is the same for every host: it knows a worker by the ends that :meth:`Host.start` gives.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from embodied_rl.channel.base import Channel
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.files import Scratch
from embodied_rl.runtime import process_worker, signals
from embodied_rl.runtime.cpu_time import CpuTimes
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.memory import held_by_workers
from embodied_rl.runtime.worker import GroupSpec, WorkerContext


class WorkerProcess(Protocol):
    """The process of one worker, wherever it is."""

    pid: int
    """On its own node."""
    here: bool
    """It is on the driver's node."""

    @property
    def exitcode(self) -> int | None:
        """None: it runs. Minus a number: that signal ended it."""
        ...

    @property
    def sentinel(self) -> Any:
        """Can be waited for; ready when the process may have ended."""
        ...

    @property
    def lost(self) -> str | None:
        """What became of it, where nobody knows its exit status: its node is gone."""
        ...

    def join(self, timeout: float) -> None: ...

    def kill(self) -> None:
        """End it at once, and all processes that it started, even if it has ended itself."""
        ...

    def show_stack(self) -> None: ...

    def resident(self) -> int:
        """Bytes of memory that it holds, with the processes that it started."""
        ...

    def close(self) -> None: ...


class Host(Protocol):
    """One or more nodes."""

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int]) -> Channel: ...

    def rendezvous(self, spec: GroupSpec) -> str:
        """Where the group's ranks meet; see :class:`WorkerContext`."""
        ...

    def start(self, context: WorkerContext, spec: GroupSpec) -> tuple[WorkerProcess, Connection]:
        """Start a worker; the connection is to it."""
        ...

    def look(self) -> str | None:
        """What has become of a node that is lost, which ends the run."""
        ...

    def check_shared(self, folder: str, key: str) -> None:
        """See :meth:`~embodied_rl.runtime.worker.Backend.check_shared`."""
        ...

    def loads(self) -> list[Load]:
        """Of each node."""
        ...

    def close(self) -> None:
        """Release everything, when no worker is left."""
        ...


class LocalProcess:
    """A worker's process that this one started."""

    here = True
    lost: str | None = None

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0  # it was started

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        if self.exitcode is None:
            self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left, or it got no group yet
            os.killpg(self.pid, signal.SIGKILL)

    def show_stack(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGUSR1)

    def resident(self) -> int:
        return held_by_workers([self.pid])[self.pid].resident

    def close(self) -> None:
        self._process.close()


class LocalHost:
    """This node: processes, pipes and shared memory."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._scratch = Scratch("embodied_rl-")
        self._cpu = CpuTimes()

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int]) -> Channel:
        del readers  # all are here
        return SharedMemoryChannel(name, keys, capacity, self._context)

    def rendezvous(self, spec: GroupSpec) -> str:
        return str(self._scratch.path / f"{spec.name}.rendezvous")

    def start(self, context: WorkerContext, spec: GroupSpec) -> tuple[WorkerProcess, Connection]:
        ours, theirs = self._context.Pipe()
        worker = process_worker.Pickled((spec.worker, dict(spec.arguments)))
        process = start_process(context, worker, theirs)
        self._cpu.add(context.name, process.pid)
        theirs.close()
        return process, ours

    def look(self) -> str | None:
        return None

    def check_shared(self, folder: str, key: str) -> None:
        pass

    def loads(self) -> list[Load]:
        return [Load.here(self._cpu.read())]

    def close(self) -> None:
        self._scratch.close()


def start_process(
    context: WorkerContext, worker: process_worker.Pickled | bytes, pipe: Connection, channels: Any = None
) -> LocalProcess:
    """Start a worker that answers at the other end of ``pipe``."""
    # multiprocessing starts it with the first process, and then unblocks the signals that we block.
    resource_tracker.ensure_running()
    process = mp.get_context("spawn").Process(
        target=process_worker.main,
        args=(context, worker, pipe, os.getpid(), process_worker.Pickled(channels)),
        name=context.name,
        daemon=False,  # an env worker may have children of its own
    )
    with signals.blocked_in_children(), _own_main(), _environment(context.environment):
        process.start()
    return LocalProcess(process)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes started in the block have these variables from their first instruction: loaders and allocators read
    some before Python runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})


@contextlib.contextmanager
def _own_main() -> Iterator[None]:
    """Processes started in the block do not execute the user's script again, which multiprocessing has them do: a
    script without ``__main__`` guard would start a run in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
