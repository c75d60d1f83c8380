"""The process backend: each worker in a process of its own, on this node or, by another host, on several.

The driver holds one connection per worker: calls go down, results, progress and failures come up. While it waits for
any result it watches every worker, so a failure anywhere ends the run at once, whoever was being waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn

from embodied_rl.channel import base
from embodied_rl.channel.base import Channel, ChannelTimeout, run_blocking
from embodied_rl.runtime import signals
from embodied_rl.runtime.host import Host, LocalHost, WorkerProcess
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.memory import GIB, MemoryWatch
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.trace import DRIVER, Trace, TracePlan
from embodied_rl.runtime.worker import (
    Abandoned,
    GroupSpec,
    StallError,
    UserFailure,
    WorkerContext,
    WorkerError,
    WorkerGroup,
    WorkerProgress,
    WorkersLost,
)

_GRACE_S: Final = 15.0
"""Time for a worker to close before it is killed."""
_PATIENCE_S: Final = 2.0
"""Time after which the user is told what is waited for."""
_SETTLE_S: Final = 0.5
"""After a first failure, how long to wait for others: a dead rank's peers may complain before its death is noticed."""
_POLL_S: Final = 1.0
"""Interval to look for dead workers that nothing announces: a forked child may hold their pipes open."""
_FROZEN_S: Final = 5.0
"""Seconds beyond a look at the workers after which this process was stopped: Ctrl-Z, or a job that was suspended."""
_WATCH_S: Final = 0.1
"""Interval to look at memory, nodes and silent workers: with many workers, messages come faster."""
_KILL_S: Final = 2.0
"""Time for a killed process to die, its memory freed, before the user is told what is waited for."""
_STUCK_S: Final = 30.0
"""Time that we wait for that."""


class _Process:
    """The driver's end of one worker."""

    def __init__(self, context: WorkerContext, process: WorkerProcess, pipe: Connection, spec: GroupSpec) -> None:
        self.context, self.process, self.pipe, self.spec = context, process, pipe, spec
        self.name, self.pid = context.name, process.pid
        self.unanswered = 0
        """Number of calls under way."""
        self.ready = False
        """It has been built, so it may have something to close."""
        self.waiting: str | None = None
        """What it waits for, a message of another worker."""
        self.doing = "to start"
        """Its last report, in words."""
        self.last_sign = time.monotonic()
        """Time of its last sign of life."""
        self.reported = False
        """It has reported progress in the present call, so it will again; to start may take long."""
        self.lost: str | None = None
        """How it came to its end, that of an expendable worker."""
        self.failure: tuple[bool, str] | None = None
        """(is it a user's mistake, message or traceback)."""

    @property
    def running(self) -> bool:
        return self.process.exitcode is None  # asks the kernel

    def receive(self) -> tuple[str, list[Any]]:
        """The next message's kind and content, after the bookkeeping that every message asks for.

        Raises:
            EOFError, OSError: there is none, and none will come.
        """
        kind, *content = self.pipe.recv()
        self.ready = True
        if kind == "waiting":
            self.waiting = content[0]
            self.last_sign = time.monotonic()
            return kind, content
        self.last_sign = time.monotonic()
        self.reported = kind == "progress" or (self.reported and kind != "result")
        if kind == "progress":
            what, done, total, _ = content
            self.doing = f"{what}, {done} of {total}" if total else what
        if kind == "failure":
            self.failure = (content[0], content[1])
        return kind, content


class ProcessHandle:
    def __init__(self, backend: ProcessBackend, tickets: list[int]) -> None:
        self._backend, self._tickets = backend, tickets

    def wait(self) -> list[Any]:
        return self._backend.collect(self._tickets)


class ProcessGroup:
    def __init__(self, name: str, processes: list[_Process], backend: ProcessBackend) -> None:
        self.name, self.world_size = name, len(processes)
        self._processes, self._backend = processes, backend

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> ProcessHandle:
        self._backend.check_present(self._processes)
        return ProcessHandle(
            self._backend, [self._backend.send(p, method.__name__, args, kwargs) for p in self._processes]
        )

    def settle(self) -> None:
        self._backend.settle(self._processes)

    def retire(self, most: int) -> list[str]:
        return self._backend.retire(self._processes, most)

    def replace(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        new: list[_Process] = []
        for index, process in enumerate(self._processes):
            if process.lost is not None:
                self._processes[index] = self._backend.spawn(process.spec, process.context)
                new.append(self._processes[index])
        self._backend.collect([self._backend.send(p, method.__name__, args, kwargs) for p in new])
        return len(new)


class ProcessBackend:
    """See :class:`embodied_rl.runtime.worker.Backend`. Its methods belong to one thread, which outlives the run: the
    kernel kills the workers when the thread that launched them ends.

    Args:
        stall_timeout: seconds without any sign of life after which :meth:`collect` gives up.
        trace: what the workers trace.
        memory_limit: GiB that the run's processes may hold together; None: any number.
        host: where the workers run; None: here. The backend closes it.
        numerics: how torch calculates in each worker.
    """

    def __init__(
        self,
        stall_timeout: float,
        trace: TracePlan | None = None,
        memory_limit: float | None = None,
        host: Host | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        self._trace, self._numerics = trace, numerics or Numerics()
        self._memory = MemoryWatch(memory_limit)
        self._host = host or LocalHost()
        self._stall_timeout = stall_timeout
        self._channels: list[Channel] = []
        self._processes: list[_Process] = []
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._listening: list[_Process] = []
        """Those whose pipes and ends the selector has."""
        self._losses = 0
        self._watched = self._looked = 0.0
        self._results: dict[int, Any] = {}
        self._ticket = 0
        self._owners: dict[int, _Process] = {}
        """Ticket of an unanswered call -> who is to answer it."""
        self._callback: Callable[[WorkerProgress], None] = lambda progress: None
        self._failure: WorkerError | UserFailure | None = None
        self._open = contextlib.ExitStack()
        atexit.register(self.shutdown)  # before multiprocessing's own hook, which would wait for the workers for ever

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int] = ()) -> Channel:
        channel = self._host.channel(name, keys, capacity, readers)
        self._channels.append(channel)
        return channel

    def launch(self, specs: Sequence[GroupSpec]) -> list[WorkerGroup]:
        self._open.enter_context(signals.stacks_on_request(self._show_stacks))
        groups: list[WorkerGroup] = []
        for spec in specs:
            meeting = self._host.rendezvous(spec)
            processes = [self.spawn(spec, self._identity(spec, rank, meeting)) for rank in range(len(spec.devices))]
            groups.append(ProcessGroup(spec.name, processes, self))
        return groups

    def _identity(self, spec: GroupSpec, rank: int, rendezvous: str) -> WorkerContext:
        return WorkerContext(
            group=spec.name,
            rank=rank,
            world_size=len(spec.devices),
            device=spec.devices[rank],
            num_threads=spec.num_threads,
            rendezvous=rendezvous,
            trace=Trace(f"{spec.name}[{rank}]", self._trace),
            numerics=self._numerics,
            pinning=spec.pinnings[rank] if spec.pinnings else None,
            environment=spec.environment,
        )

    def spawn(self, spec: GroupSpec, context: WorkerContext) -> _Process:
        """Start a worker."""
        with signals.deferred():  # a process that has been started is one that we know of
            process, pipe = self._host.start(context, spec)
            self._processes.append(_Process(context, process, pipe, spec))
        return self._processes[-1]

    def send(self, process: _Process, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Start a call in one worker; the number is for :meth:`collect`. Raises as that does."""
        self._check()
        self._ticket += 1
        try:
            with signals.deferred():
                process.pipe.send((self._ticket, method, args, kwargs, base.epoch))
                if not process.unanswered:
                    process.doing, process.last_sign = method.replace("_", " "), time.monotonic()
                process.unanswered += 1
                self._owners[self._ticket] = process
        except OSError:  # it died since it was last heard of: say how
            self._gone(process)
            raise WorkersLost(process.lost) from None
        self._callback(WorkerProgress(worker=process.name, what=method.replace("_", " ")))
        return self._ticket

    def abandon(self, channel: Channel, keys: Sequence[Hashable]) -> None:
        for key in keys:
            with contextlib.suppress(ChannelTimeout):  # a lane stays full where nobody waits for a message
                run_blocking(channel.put(Abandoned(), key=key, timeout=_GRACE_S))

    def on_progress(self, callback: Callable[[WorkerProgress], None]) -> None:
        self._callback = callback

    def collect(self, tickets: Sequence[int]) -> list[Any]:
        """Wait for the results of ``tickets``, watching every worker meanwhile.

        Raises:
            WorkersLost: one that was to give a result is lost.
            WorkerError: a worker raised or died. Every later call raises it again.
            StallError: no worker gave a sign of life for ``stall_timeout`` seconds while it was waited for.
            UserFailure: a worker refused its input.
        """
        self._check()

        missing, losses = list(tickets), -1

        def answered() -> bool:  # asked at each message of a worker: it looks at all of them when one was lost only
            nonlocal losses
            while missing and missing[-1] in self._results:
                missing.pop()
            if losses == self._losses:
                return not missing
            losses = self._losses
            return not missing or any(self._owners[t].lost for t in missing if t not in self._results)

        self._until(answered)
        self.check_present([self._owners[ticket] for ticket in missing if ticket not in self._results])
        for ticket in tickets:
            del self._owners[ticket]
        return [self._results.pop(ticket) for ticket in tickets]

    def settle(self, processes: Sequence[_Process]) -> None:
        """Wait until none of the processes has a call under way, and forget their results."""
        self._until(lambda: all(p.lost or not p.unanswered for p in processes))
        for ticket in [ticket for ticket, owner in self._owners.items() if owner in processes]:
            del self._owners[ticket]
            self._results.pop(ticket, None)

    def retire(self, processes: Sequence[_Process], most: int) -> list[str]:
        """End those of the processes, which have no call under way, that hold more bytes than ``most``."""
        sizes = [(p, p.process.resident()) for p in processes if p.lost is None]
        return [self._lose(p, f"{p.name} held {size / GIB:.2f} GiB") for p, size in sizes if size > most]

    def check_present(self, processes: Sequence[_Process]) -> None:
        """Raise WorkersLost if one of them is lost."""
        if lost := [p.lost for p in dict.fromkeys(processes) if p.lost is not None]:
            raise WorkersLost("\n\n".join(lost))

    def _until(self, done: Callable[[], bool]) -> None:
        began = last_sign = time.monotonic()
        while not done():
            looked = time.monotonic()
            left = last_sign + self._stall_timeout - looked
            if left <= 0:
                self._stalled()
            alive = self._receive(min(left, _POLL_S))
            if (frozen := time.monotonic() - looked - _POLL_S) > _FROZEN_S:  # nobody could give a sign, or hear one
                began, last_sign = began + frozen, last_sign + frozen
                for process in self._processes:
                    process.last_sign += frozen
            if alive:
                last_sign = time.monotonic()
            if time.monotonic() - self._watched >= _WATCH_S:
                self._watched = time.monotonic()
                self._watch_memory()
                self._watch_nodes()
                self._watch_silence(began)

    def _watch_silence(self, began: float) -> None:
        for process in [p for p in self._processes if p.spec.expendable and p.spec.timeout is not None]:
            silent = time.monotonic() - max(process.last_sign, began)
            if process.unanswered and process.reported and not process.waiting and silent > process.spec.timeout:  # type: ignore[operator]
                self._show_stack(process)
                self._lose(process, f"{process.name} hung: no sign of life for {silent:.0f} s, its stack is above")

    def _watch_memory(self) -> None:
        if complaint := self._memory.look(self.pids()):
            self._failure = WorkerError(complaint)
            raise self._failure

    def _watch_nodes(self) -> None:
        if complaint := self._host.look():
            self._failure = WorkerError(complaint)
            self._close_channels()
            raise self._failure

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close(str(self._failure))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _receive(self, timeout: float) -> bool:
        """Take in what has arrived; True if there was a sign of life."""
        alive = False
        ready = self._wait(timeout)
        for process in filter(None, ready):
            with signals.deferred():  # half a message read, or a result lost, and nobody could be called any more
                try:
                    kind, content = process.receive()
                except (EOFError, OSError):
                    self._gone(process)
                    return True
                alive = alive or kind != "waiting"
                if kind == "result":
                    self._results[content[0]] = content[1]
                    process.unanswered -= 1
                    if not process.unanswered:
                        self._callback(WorkerProgress(worker=process.name, what=None))
                elif kind == "progress":
                    what, done, total, fraction = content
                    self._callback(
                        WorkerProgress(worker=process.name, what=what, done=done, total=total, fraction=fraction)
                    )
                elif kind == "failure":
                    self._gone(process)
                    return True
        now = time.monotonic()
        if None in ready or not ready or now - self._looked >= _POLL_S:
            self._looked = now
            for process in [p for p in self._processes if not p.running]:
                self._gone(process)
        return alive

    def _wait(self, timeout: float) -> list[_Process | None]:
        """Those that have said something; None among them where one may have ended."""
        if self._listening != self._processes:  # to register all for each message takes longer than all else
            self._selector.close()
            self._selector, self._listening = selectors.DefaultSelector(), list(self._processes)
            for process in self._listening:
                self._selector.register(process.pipe, selectors.EVENT_READ, process)
            for sentinel in _sentinels(self._listening):
                self._selector.register(sentinel, selectors.EVENT_READ, None)
        return [key.data for key, _ in self._selector.select(timeout)]

    def _gone(self, process: _Process) -> None:
        """It failed, or died: the end of the run, unless it is expendable and made no mistake of the user's known."""
        if not process.spec.expendable or (process.failure is not None and process.failure[0]):
            self._fail()
        if process.failure is None:
            with contextlib.suppress(Exception):  # its last words may be in the pipe
                while process.pipe.poll():
                    process.receive()
        if process.failure is not None and process.failure[0]:
            self._fail()
        process.process.join(_KILL_S)
        if process.process.lost is not None:  # the node's other workers are, too, and its lanes
            self._fail()
        self._lose(process, self._describe_end(process))

    def _lose(self, process: _Process, how: str) -> str:
        with signals.deferred():
            process.process.kill()
            process.process.join(_STUCK_S)
            process.pipe.close()
            process.lost = how
            self._losses += 1
            self._processes.remove(process)
        self._callback(WorkerProgress(worker=process.name, what=None))
        return how

    def _describe_end(self, process: _Process) -> str:
        if process.failure is not None:
            return f"{process.name} failed:\n{process.failure[1].rstrip()}"
        return self._describe_exit(process)

    def _describe_exit(self, process: _Process) -> str:
        if process.process.lost is not None:
            return f"{process.name} (process {process.pid}) is lost: {process.process.lost}"
        code = process.process.exitcode
        if code is not None and code < 0:
            name = next((s.name for s in signal.Signals if s == -code), "a real-time signal")
            cause = f"was killed by {name} (signal {-code})"
            if code == -signal.SIGKILL:
                cause += f"; {self._memory.of_killed(process.name)}"
        else:
            cause = f"ended with exit status {code}"
        return f"{process.name} (process {process.pid}) {cause}."

    def _show_stack(self, process: _Process) -> None:
        if not process.ready:  # the signal would end it
            signals.say(f"--- {process.name} is starting ---\n")
            return
        signals.say(f"--- stack of {process.name} ---\n")
        process.process.show_stack()
        time.sleep(0.2)  # so that stacks do not interleave

    def _fail(self) -> NoReturn:
        """Raise for the worker that failed, and for all others that have failed by then: deaths first."""
        deadline = time.monotonic() + _SETTLE_S
        pipes = {p.pipe: p for p in self._processes}
        closed: list[_Process] = []
        while pipes and (left := deadline - time.monotonic()) > 0:
            for item in wait(list(pipes), left):
                try:
                    pipes[item].receive()  # type: ignore[index]
                except (EOFError, OSError):
                    closed.append(pipes.pop(item))  # type: ignore[call-overload]
        dying = [p for p in closed if p.failure is None]
        while any(p.running for p in dying) and time.monotonic() < deadline + _KILL_S:
            time.sleep(0.01)
        failed = [p for p in self._processes if p.failure is not None]
        silent = [p for p in self._processes if p.failure is None]
        texts = [self._describe_exit(p) for p in silent if not p.running]
        refusals = [p.failure[1] for p in failed if p.failure and p.failure[0]]
        if refusals and not texts:
            self._failure = UserFailure(refusals[0])
        else:
            texts += [f"{p.name} failed:\n{p.failure[1].rstrip()}" for p in failed if p.failure and not p.failure[0]]
            texts += [f"{p.name} closed its connection, but runs." for p in dying if p.running]
            self._failure = WorkerError("\n\n".join(texts))
        self._close_channels()
        raise self._failure

    def _show_stacks(self) -> None:
        for process in list(self._processes):
            self._show_stack(process)

    def _stalled(self) -> NoReturn:
        self._show_stacks()
        now = time.monotonic()
        called = [p for p in self._processes if p.unanswered]
        states = [
            f"  {p.name} waits for {p.waiting}"
            if p.waiting
            else f"  {p.name} HANGS: no sign of life for {now - p.last_sign:.0f} s, since {p.doing!r}"
            for p in sorted(called, key=lambda p: p.waiting is not None)
        ]
        depths = "\n".join(f"  {channel.name}: {channel.depth()}" for channel in self._channels)
        self._failure = StallError(
            f"no worker has shown a sign of life for {self._stall_timeout:g} s (cluster.stall_timeout):\n"
            + "\n".join(states)
            + f"\nTheir stacks are above. Messages waiting in the channels:\n{depths or '  there are no channels'}"
        )
        raise self._failure

    def check_shared(self, folder: str, key: str) -> None:
        self._host.check_shared(folder, key)

    def loads(self) -> list[Load]:
        first, *others = self._host.loads()
        own = {DRIVER: time.process_time()}  # which is on the first node, or near it
        return [first._replace(workers={**first.workers, **own}), *others]

    def pids(self) -> dict[str, int]:
        return {p.name: p.pid for p in list(self._processes) if p.process.here}  # another thread may ask

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        self._open.close()
        with signals.deferred() as signalled:  # another Ctrl-C ends the waiting, not the tidying
            self._drain()
            for channel in self._channels:
                channel.close("the run is over")
            for process in self._processes:
                process.pipe.close()  # what a worker waits for between calls
                if not process.ready:
                    process.process.kill()
            self._wait_for_workers(signalled)
            for process in self._processes:
                process.process.kill()
            self._reap()
            self._selector.close()
            self._listening = []
            self._channels.clear()
            self._host.close()

    def _drain(self) -> None:
        """Learn who is ready."""
        for process in self._processes:
            with contextlib.suppress(Exception):  # whatever it was, it is too late for it
                while process.pipe.poll():
                    process.receive()

    def _wait_for_workers(self, signalled: Sequence[int]) -> None:
        start, said = time.monotonic(), False
        while (alive := [p for p in self._processes if p.running]) and not signalled:
            waited = time.monotonic() - start
            if waited > _GRACE_S:
                return
            if waited > _PATIENCE_S and not said:
                said = True
                names = ", ".join(p.name for p in alive)
                print(f"waiting {_GRACE_S:g} s at most for {names} to close; Ctrl-C: at once", file=sys.stderr)
            wait(_sentinels(alive), 0.1)

    def _reap(self) -> None:
        start, said = time.monotonic(), False
        for process in self._processes:
            while process.running and (waited := time.monotonic() - start) < _STUCK_S:
                if waited > _KILL_S and not said:
                    said = True
                    print(f"{process.name} is still ending: the system frees its memory", file=sys.stderr)
                time.sleep(0.01)
            if process.running:
                print(
                    f"{process.name} (process {process.pid}) was killed {_STUCK_S:g} s ago and is still there, stuck "
                    "in the kernel, for example in a driver; see that it ends before another run needs its memory",
                    file=sys.stderr,
                )
            else:
                process.process.close()
        self._processes.clear()


def _sentinels(processes: Iterable[_Process]) -> list[Any]:
    return list(dict.fromkeys(p.process.sentinel for p in processes))  # those of a node have one together
