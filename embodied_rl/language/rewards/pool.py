"""Processes that score completions: each is given one at a time, and killed and replaced if it takes too long.

``concurrent.futures`` cannot end a task that has begun, which is why this is our own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Final

from embodied_rl.errors import UserError
from embodied_rl.language.rewards import process as scoring_process
from embodied_rl.language.rewards.functions import Part
from embodied_rl.runtime import signals

if TYPE_CHECKING:
    from embodied_rl.language.rewards.scoring import Item

START_S: Final = 120.0
"""How long a process may take to import the functions and call them once."""
_CLOSE_S: Final = 2.0
"""How long one may take to end by itself."""
_SHOWN: Final = 200
"""Characters of a text in a message."""


class RewardError(RuntimeError):
    """A reward function raised in its process; the message is its traceback."""


class _Process:
    """One of the processes, from this side."""

    def __init__(self, parts: Sequence[Part]) -> None:
        context = mp.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=scoring_process.main, args=(parts, theirs, os.getpid()), daemon=True, name="reward"
        )
        with signals.blocked_in_children():
            self.process.start()
        theirs.close()  # so that the pipe ends with the process
        self.ready = False
        self.item: int | None = None
        """The place of what it scores."""
        self.deadline = time.monotonic() + START_S

    @property
    def idle(self) -> bool:
        return self.ready and self.item is None

    def give(self, place: int, item: Item, timeout: float) -> None:
        self.item, self.deadline = place, time.monotonic() + timeout
        self.pipe.send(asdict(item))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class ScoringPool:
    """Scores items in processes that are started once and reused.

    Args:
        parts: of the weighted sum to compute.
        processes: how many.
        timeout: seconds that an item may take; then it is unverified, and its process is replaced.

    Raises:
        UserError: the functions cannot be loaded, or a process does not get ready.
    """

    def __init__(self, parts: Sequence[Part], *, processes: int, timeout: float) -> None:
        self._parts, self._timeout = tuple(parts), timeout
        self._name = " + ".join(part.function for part in parts)
        self._processes: list[_Process] = []
        try:
            for _ in range(processes):
                self._processes.append(_Process(self._parts))
            while not all(process.ready for process in self._processes):
                self._wait([], [])
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Item], report: Callable[[int, int], None]) -> list[float | None]:
        """One number for each item, in their order; None: unverified, or not within the time limit.

        Raises:
            UserError: a function returned no number, or ended its process.
            RewardError: it raised.
        """
        scores: list[float | None] = [None] * len(items)
        todo = deque(enumerate(items))
        done = 0
        try:
            while done < len(items):
                for process in self._processes:
                    if process.idle and todo:
                        process.give(*todo.popleft(), self._timeout)
                done += self._wait(scores, items)
                report(done, len(items))
        except BaseException:
            self.close()  # the processes' answers would be taken for those of other items
            raise
        return scores

    def _wait(self, scores: list[float | None], items: Sequence[Item]) -> int:
        """Wait for the next message, end or deadline; returns how many items are done by it."""
        waiting = [process for process in self._processes if not process.idle]
        seconds = min(process.deadline for process in waiting) - time.monotonic()
        wait([w for process in waiting for w in (process.pipe, process.process.sentinel)], max(seconds, 0))
        done = 0
        for process in waiting:
            place = process.item
            if process.pipe.poll():
                done += self._hear(process, scores, items)
            elif process.process.exitcode is not None:
                raise self._ended(process, items)
            elif time.monotonic() > process.deadline:
                if place is None:
                    raise UserError(
                        f"reward.function={self._name}: a process did not get ready within {START_S:g} s; see whether "
                        "it ends in reward.num_processes=0"
                    )
                process.kill()
                self._processes[self._processes.index(process)] = _Process(self._parts)
                done += 1
        return done

    def _hear(self, process: _Process, scores: list[float | None], items: Sequence[Item]) -> int:
        try:
            kind, value = process.pipe.recv()
        except (EOFError, OSError):
            process.process.join(_CLOSE_S)
            raise self._ended(process, items) from None
        if kind == "user":
            raise UserError(value)
        if kind == "raised":
            raise RewardError(f"reward.function={self._name} raised{_of(process, items)}:\n{value}")
        if kind == "ready":
            process.ready = True
            return 0
        assert process.item is not None
        scores[process.item], process.item = value, None
        return 1

    def _ended(self, process: _Process, items: Sequence[Item]) -> UserError:
        code = process.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return UserError(
            f"reward.function={self._name} ended its process ({how}){_of(process, items)}; correct the function"
        )

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        for process in self._processes:
            process.pipe.close()
        until = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.process.join(0 if process.item is not None else max(until - time.monotonic(), 0))
            process.kill()
        self._processes = []


def _of(process: _Process, items: Sequence[Item]) -> str:
    """What a process was scoring, for messages."""
    if process.item is None:
        return " at its start"
    return f" on the completion {items[process.item].completion[:_SHOWN]!r}"
