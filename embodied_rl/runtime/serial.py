"""The serial backend: all workers in this process and this thread, for a debugger and for tests."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from embodied_rl.channel.base import Channel
from embodied_rl.channel.in_process import InProcessChannel, Scheduler, Task
from embodied_rl.runtime.load import Load
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.trace import DRIVER, Trace, TracePlan
from embodied_rl.runtime.worker import GroupSpec, Worker, WorkerContext, WorkerGroup, WorkerProgress


class SerialHandle:
    def __init__(self, scheduler: Scheduler, tasks: list[Task]) -> None:
        self._scheduler, self._tasks = scheduler, tasks

    def wait(self) -> list[Any]:
        for task in self._tasks:
            self._scheduler.run_until(task)
        return [task.result for task in self._tasks]


class SerialGroup:
    def __init__(self, name: str, workers: list[Worker], scheduler: Scheduler) -> None:
        self.name, self.workers, self.world_size = name, workers, len(workers)
        self._scheduler = scheduler

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> SerialHandle:
        tasks = [
            self._scheduler.add(
                worker.context.name,
                _run(worker, method.__name__, args, kwargs),
                before=lambda threads=worker.context.num_threads: torch.set_num_threads(threads),
            )
            for worker in self.workers
        ]
        return SerialHandle(self._scheduler, tasks)

    def settle(self) -> None:
        self._scheduler.cancel()

    def retire(self, most: int) -> list[str]:
        del most  # they share a process
        return []

    def replace(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        del method, args, kwargs  # an exception reaches the caller as it is
        return 0


async def _run(worker: Worker, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with worker.context.trace.call(method, kwargs.get("step")), worker.context.numerics.explained():
        result = getattr(worker, method)(*args, **kwargs)
        return await result if inspect.iscoroutine(result) else result


class SerialBackend:
    """See :class:`embodied_rl.runtime.worker.Backend`. A worker's exception reaches the caller as it is, so that a
    debugger stops where it was raised. Until :meth:`shutdown` the process calculates as its workers are to."""

    def __init__(self, trace: TracePlan | None = None, numerics: Numerics | None = None) -> None:
        self._trace, self._numerics = trace, numerics or Numerics()
        self._scheduler = Scheduler()
        self._channels: list[InProcessChannel] = []
        self._workers: list[Worker] = []
        self._callback: Callable[[WorkerProgress], None] | None = None
        self._threads, self._applied = torch.get_num_threads(), contextlib.ExitStack()

    def channel(self, name: str, keys: Sequence[Hashable], capacity: int, readers: Sequence[int] = ()) -> Channel:
        del keys, readers  # lanes appear as they are used
        channel = InProcessChannel(name, capacity)
        self._channels.append(channel)
        return channel

    def launch(self, specs: Sequence[GroupSpec]) -> list[WorkerGroup]:
        groups: list[WorkerGroup] = []
        self._applied.enter_context(self._numerics.applied())
        for spec in specs:
            workers: list[Worker] = []
            for rank, device in enumerate(spec.devices):
                trace = Trace(f"{spec.name}[{rank}]", self._trace)
                context = WorkerContext(
                    group=spec.name,
                    rank=rank,
                    world_size=len(spec.devices),
                    device=device,
                    num_threads=spec.num_threads,
                    rendezvous=os.path.join(tempfile.gettempdir(), "unused: one rank"),
                    trace=trace,
                    report_progress=trace.reporting(functools.partial(self._report, f"{spec.name}[{rank}]")),
                    numerics=self._numerics,
                )
                workers.append(spec.worker(context, **spec.arguments))
                self._workers.append(workers[-1])
            groups.append(SerialGroup(spec.name, workers, self._scheduler))
        return groups

    def on_progress(self, callback: Callable[[WorkerProgress], None]) -> None:
        self._callback = callback

    def abandon(self, channel: Channel, keys: Sequence[Hashable]) -> None:
        del channel, keys  # a suspended worker can answer another call
        self._scheduler.cancel()

    def _report(self, worker: str, what: str, done: int, total: int, fraction: float | None = None) -> None:
        if self._callback is not None:
            self._callback(WorkerProgress(worker=worker, what=what, done=done, total=total, fraction=fraction))

    def check_shared(self, folder: str, key: str) -> None:
        pass

    def loads(self) -> list[Load]:
        workers = self._scheduler.seconds
        return [Load.here({**workers, DRIVER: time.process_time() - sum(workers.values())})]

    def pids(self) -> dict[str, int]:
        return {}

    def shutdown(self) -> None:
        with contextlib.ExitStack() as stack:  # runs all of it, last line first, whatever raises
            stack.callback(torch.set_num_threads, self._threads)
            stack.callback(self._applied.close)
            while self._workers:
                stack.callback(self._workers.pop(0).close)
            for channel in self._channels:
                stack.callback(channel.close)
            stack.callback(self._scheduler.cancel)
