"""The process backend: each worker in a process of its own, on this node.

The driver holds one pipe per worker: calls go down, results, progress and failures come up. While it waits for any
result it watches every worker, so a failure anywhere ends the run at once, whoever was being waited for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from embodied_rl.channel.base import Channel
from embodied_rl.channel.shared_memory import SharedMemoryChannel
from embodied_rl.errors import UserError
from embodied_rl.runtime.cooperative import run_blocking
from embodied_rl.runtime.worker import (
    GroupSpec,
    ProgressCallback,
    StallError,
    UserFailure,
    Worker,
    WorkerContext,
    WorkerError,
    WorkerGroup,
)

_GRACE_S: Final = 5.0
"""How long a worker may take to close before it is killed."""
_SETTLE_S: Final = 0.5
"""After a first failure, how long to wait for others: a dead rank's peers may complain before its death is noticed."""


class _Process:
    """The driver's end of one worker."""

    def __init__(self, context: WorkerContext, process: BaseProcess, pipe: Connection) -> None:
        self.context, self.process, self.pipe = context, process, pipe
        self.name = context.name


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
        return ProcessHandle(
            self._backend, [self._backend.send(p, method.__name__, args, kwargs) for p in self._processes]
        )


class ProcessBackend:
    """See :class:`embodied_rl.runtime.worker.Backend`.

    Args:
        stall_timeout: seconds without any sign of life after which :meth:`collect` gives up.
    """

    def __init__(self, stall_timeout: float) -> None:
        self._context = mp.get_context("spawn")
        self._stall_timeout = stall_timeout
        self._channels: list[SharedMemoryChannel] = []
        self._processes: list[_Process] = []
        self._results: dict[int, Any] = {}
        self._ticket = 0
        self._callback: ProgressCallback | None = None
        self._scratch = tempfile.mkdtemp(prefix="embodied_rl-")

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int) -> Channel:
        channel = SharedMemoryChannel(name, keys, capacity, self._context)
        self._channels.append(channel)
        return channel

    def launch(self, specs: Sequence[GroupSpec]) -> list[WorkerGroup]:
        groups: list[WorkerGroup] = []
        for spec in specs:
            processes = [self._spawn(spec, rank, device) for rank, device in enumerate(spec.devices)]
            groups.append(ProcessGroup(spec.name, processes, self))
        return groups

    def _spawn(self, spec: GroupSpec, rank: int, device: str) -> _Process:
        context = WorkerContext(
            group=spec.name,
            rank=rank,
            world_size=len(spec.devices),
            device=device,
            num_threads=spec.num_threads,
            rendezvous=os.path.join(self._scratch, f"{spec.name}.rendezvous"),
        )
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_worker_main,
            args=(context, spec.worker, dict(spec.arguments), theirs, os.getpid()),
            name=context.name,
            daemon=False,  # an env worker may have children of its own
        )
        process.start()
        theirs.close()
        self._processes.append(_Process(context, process, ours))
        return self._processes[-1]

    def send(self, process: _Process, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        self._ticket += 1
        try:
            process.pipe.send((self._ticket, method, args, kwargs))
        except OSError:  # it died since it was last heard of: say how
            self._fail()
        return self._ticket

    def on_progress(self, callback: ProgressCallback) -> None:
        self._callback = callback

    def collect(self, tickets: Sequence[int]) -> list[Any]:
        """Wait for the results of ``tickets``, watching every worker meanwhile."""
        last_sign = time.monotonic()
        while not all(ticket in self._results for ticket in tickets):
            left = self._stall_timeout - (time.monotonic() - last_sign)
            if left <= 0:
                self._stalled()
            if self._receive(left):
                last_sign = time.monotonic()
        return [self._results.pop(ticket) for ticket in tickets]

    def _receive(self, timeout: float) -> bool:
        """Take in what has arrived; True if anything has."""
        pipes = {p.pipe: p for p in self._processes}
        ready = wait([*pipes, *(p.process.sentinel for p in self._processes)], timeout)
        for item in ready:
            if isinstance(item, Connection):
                try:
                    kind, *content = item.recv()
                except (EOFError, OSError):
                    self._fail()
                if kind == "result":
                    self._results[content[0]] = content[1]
                elif kind == "progress":
                    if self._callback is not None:
                        self._callback(*content)
                else:
                    self._fail((pipes[item], content[0], content[1]))
            else:
                self._fail()
        return bool(ready)

    def _fail(self, first: tuple[_Process, bool, str] | None = None) -> None:
        """Raise for the worker that failed, and for all others that have failed by then: deaths first."""
        failures = [first] if first else []
        deadline = time.monotonic() + _SETTLE_S
        open_pipes = {p.pipe: p for p in self._processes}
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for item in wait(list(open_pipes), left):
                process = open_pipes[item]  # type: ignore[index]
                try:
                    kind, *content = process.pipe.recv()
                except (EOFError, OSError):
                    del open_pipes[process.pipe]
                    continue
                if kind == "failure":
                    failures.append((process, content[0], content[1]))
        texts = [_obituary(p) for p in self._processes if not p.process.is_alive() and p.process.exitcode != 0]
        refusals = [text for _, by_user, text in failures if by_user]
        if refusals and not texts:
            raise UserFailure(refusals[0])
        texts += [f"{p.name} failed:\n{text}" for p, by_user, text in failures if not by_user]
        message = "\n\n".join(texts) or "a worker closed its connection without a word"
        self._close_channels(message)
        raise WorkerError(message)

    def _stalled(self) -> None:
        depths = "\n".join(f"  {channel.name}: {channel.depth()}" for channel in self._channels)
        for process in self._processes:
            print(f"--- stack of {process.name} ---", file=sys.stderr, flush=True)
            if process.process.pid and process.process.is_alive():
                os.kill(process.process.pid, signal.SIGUSR1)
                time.sleep(0.2)  # so that the stacks do not interleave
        raise StallError(
            f"no worker has shown a sign of life for {self._stall_timeout:.0f} s (cluster.stall_timeout); their "
            f"stacks are above. Messages waiting in the channels:\n{depths}"
        )

    def _close_channels(self, error: str | None) -> None:
        for channel in self._channels:
            channel.close(error)

    def shutdown(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.pipe.send(None)
        self._close_channels("the run is over")
        deadline = time.monotonic() + _GRACE_S
        for step in ("wait", "terminate", "kill"):
            for process in self._processes:
                if step != "wait" and process.process.is_alive():
                    getattr(process.process, step)()
                process.process.join(max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.pipe.close()
            process.process.close()
        self._processes.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _obituary(process: _Process) -> str:
    code = process.process.exitcode
    if code is not None and code < 0:
        cause = f"was killed by {signal.Signals(-code).name} (signal {-code})"
        if code == -signal.SIGKILL:
            cause += "; if nobody did that, the system ran out of memory: use fewer envs or workers"
    else:
        cause = f"ended with exit status {code}"
    return f"{process.name} (process {process.process.pid}) {cause}."


# In the worker's process.


def _worker_main(
    context: WorkerContext,
    worker_class: Callable[..., Worker],
    arguments: dict[str, Any],
    pipe: Connection,
    driver_pid: int,
) -> None:
    _die_with_driver(driver_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the driver decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    worker: Worker | None = None
    try:
        import torch

        torch.set_num_threads(context.num_threads)
        context = replace(context, report_progress=lambda *progress: pipe.send(("progress", *progress)))
        worker = worker_class(context, **arguments)
        while (call := pipe.recv()) is not None:
            ticket, method, args, kwargs = call
            result = getattr(worker, method)(*args, **kwargs)
            if inspect.iscoroutine(result):  # its channels block, so it never suspends
                result = run_blocking(result)
            pipe.send(("result", ticket, result))
    except (EOFError, BrokenPipeError):
        pass  # the driver is gone
    except UserError as error:
        _report(pipe, True, str(error))
    except BaseException:
        _report(pipe, False, traceback.format_exc())
    finally:
        if worker is not None:
            worker.close()
        pipe.close()


def _report(pipe: Connection, by_user: bool, text: str) -> None:
    try:
        pipe.send(("failure", by_user, text))
    except OSError:
        print(text, file=sys.stderr)


def _die_with_driver(driver_pid: int) -> None:
    """Ask the kernel to kill this process when the driver dies, however it dies (Linux)."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != driver_pid:  # it died before we asked
        os._exit(1)
