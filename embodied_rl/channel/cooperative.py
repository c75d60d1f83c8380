"""One thread, many workers: the scheduler of the serial backend.

Worker methods that exchange messages are coroutines. In a process of its own a worker's coroutine never suspends,
since its channels block; in the serial backend a channel that has nothing to give awaits :func:`until`, and the
scheduler lets the other workers run. So both backends run the same code, and a debugger sees one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every coroutine waits for something that only another coroutine could bring."""


class _Waiting:
    """What a suspended coroutine yields to the scheduler."""

    def __init__(self, ready: Callable[[], bool], what: str) -> None:
        self.ready, self.what = ready, what

    def __await__(self) -> Generator[_Waiting, None, None]:
        yield self


def until(ready: Callable[[], bool], what: str) -> Awaitable[None]:
    """Suspend until ``ready()`` is true. ``what`` names the wait in a deadlock's message."""
    return _Waiting(ready, what)


class Task:
    """A coroutine in the scheduler's care: finished when ``done``, then ``result`` or ``error`` is set."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, Any], before: Callable[[], None]) -> None:
        self.name, self.coroutine, self.before = name, coroutine, before
        self.waiting: _Waiting | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Run until the next wait or the end."""
        self.before()
        try:
            self.waiting = self.coroutine.send(None)
        except StopIteration as stop:
            self.done, self.result = True, stop.value
        except BaseException as error:
            self.done, self.error = True, error


class Scheduler:
    """Runs tasks in the order they were added, each as far as it can go. Deterministic."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, coroutine: Coroutine[Any, Any, Any], before: Callable[[], None] = lambda: None) -> Task:
        """Schedule a coroutine. ``before`` is called each time it is about to go on."""
        task = Task(name, coroutine, before)
        self.tasks.append(task)
        return task

    def run_until(self, task: Task) -> None:
        """Run all tasks until ``task`` is done. The first task that fails ends the run and its error is raised here.

        Raises:
            DeadlockError: no task can go on; the message lists who waits for what.
        """
        while not task.done:
            runnable = [t for t in self.tasks if t.waiting is None or t.waiting.ready()]
            if not runnable:
                waits = "\n".join(f"  {t.name} waits for {t.waiting.what if t.waiting else '?'}" for t in self.tasks)
                raise DeadlockError(f"no worker can go on:\n{waits}")
            try:
                for current in runnable:
                    current.advance()
                    if current.error is not None:
                        raise current.error
            finally:
                self.tasks = [t for t in self.tasks if not t.done]
        if task.error is not None:  # it failed while another task was being waited for
            raise task.error

    def cancel(self) -> None:
        """Close every unfinished task's coroutine, also where one of them raises as it is closed."""
        with contextlib.ExitStack() as stack:
            while self.tasks:
                stack.callback(self.tasks.pop().coroutine.close)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose channels block, as in a worker's own process.

    Raises:
        RuntimeError: it suspended, so it awaited an in-process channel outside the serial backend.
    """
    try:
        waiting = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError(f"waited for {getattr(waiting, 'what', waiting)} outside the serial backend's scheduler")
