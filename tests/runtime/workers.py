"""Small workers for the tests of the runtime. Spawned processes import this module, so it imports nothing heavy."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.errors import UserError
from embodied_rl.runtime.worker import Worker, WorkerContext

if TYPE_CHECKING:
    from embodied_rl.channel.base import Channel

FOR_EVER = 600.0


class Probe(Worker):
    """Answers, fails, dies and hangs as it is told. Leaves a file ``<name>.closed`` in ``folder`` when it is closed."""

    def __init__(self, context: WorkerContext, *, folder: Path | None = None, build_seconds: float = 0.0) -> None:
        super().__init__(context)
        self.folder = folder
        time.sleep(build_seconds)

    def close(self) -> None:
        if self.folder is not None:
            (self.folder / f"{self.context.name}.closed").touch()

    def identity(self) -> tuple[Any, ...]:
        context = self.context
        return context.name, context.rank, context.world_size, context.device, os.getpid()

    def threads(self) -> tuple[str | None, str | None, bool, int]:
        """OMP_NUM_THREADS and OMP_WAIT_POLICY, whether torch was imported before now, and torch's threads."""
        before = "torch" in sys.modules
        import torch

        return os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY"), before, torch.get_num_threads()

    def add(self, a: int, *, b: int = 0) -> int:
        return a + b + 100 * self.context.rank

    def count(self, total: int) -> None:
        for done in range(1, total + 1):
            self.context.report_progress(f"{self.context.name} counts", done, total)

    def lock(self) -> None:
        """A lock of multiprocessing's, as tqdm makes one: a named semaphore."""
        self.held = multiprocessing.RLock()

    def sleep(self, seconds: float = FOR_EVER) -> None:
        time.sleep(seconds)

    def live(self, seconds: float) -> None:
        """Give signs of life."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.context.report_progress("lives", 0, 1)
            time.sleep(0.05)

    def write(self, path: Path, seconds: float, chunk: int) -> None:
        """Write so many bytes ten times a second, as one long call would, and report nothing."""
        end = time.monotonic() + seconds
        with path.open("wb", buffering=0) as file:
            while time.monotonic() < end:
                file.write(bytes(chunk))
                time.sleep(0.1)

    def sleep_deaf(self) -> None:
        """Sleep for ever, after a sign of life, without an ear for SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.context.report_progress("deaf", 0, 1)
        time.sleep(FOR_EVER)

    def fail(self, text: str = "the gripper is stuck") -> None:
        raise ValueError(text)

    def break_pipe(self) -> None:
        raise BrokenPipeError("the simulator's pipe broke")

    def refuse(self) -> None:
        raise UserError("got 3 cubes, expected 2; remove one")

    def exit_politely(self) -> None:
        sys.exit(0)

    def return_unpicklable(self) -> Any:
        return lambda: None

    async def sleep_in_event_loop(self) -> None:
        await asyncio.sleep(0)

    def exit_at_once(self, status: int) -> None:
        os._exit(status)

    def kill_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def complain_of_the_dying(self) -> None:
        """Rank 1 dies; before that is noticed, rank 0 complains of the lost connection."""
        if self.context.rank == 0:
            raise ConnectionError("peer 1 hung up")
        time.sleep(0.2)
        self.kill_self()

    def start_child(self) -> int:
        """A program that runs for ever; returns its process id."""
        return subprocess.Popen(["sleep", str(FOR_EVER)]).pid

    def start_large_child(self, size: int, rank: int) -> int | None:
        """In that rank a program that holds so many bytes for ever; returns its process id."""
        if self.context.rank != rank:
            return None
        script = f"import time; kept = b'x' * {size}; print(flush=True); time.sleep({FOR_EVER})"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        return child.pid

    def fork_child(self) -> int:
        """A copy of this process, which has all its files and pipes, that runs for ever; returns its process id."""
        child = os.fork()
        if child == 0:
            time.sleep(FOR_EVER)
            os._exit(0)
        return child


class Unbuildable(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        raise ValueError("no display")


class Asker(Worker):
    """Sends its rank's numbers through ``questions`` and collects ``answers``, both keyed by rank."""

    def __init__(self, context: WorkerContext, *, questions: Channel, answers: Channel) -> None:
        super().__init__(context)
        self.questions, self.answers = questions, answers

    async def ask(self, numbers: list[int]) -> list[int]:
        received = []
        for number in numbers:
            await self.questions.put(number, key=self.context.rank)
            received.append(await self.answers.get(key=self.context.rank))
        return received

    async def wait_for_ever(self) -> None:
        await self.answers.get(key=self.context.rank)


class Answerer(Worker):
    """Answers each of ``askers`` ranks ``times`` times: n -> 10 n + the rank that asked."""

    def __init__(self, context: WorkerContext, *, questions: Channel, answers: Channel, askers: int) -> None:
        super().__init__(context)
        self.questions, self.answers, self.askers = questions, answers, askers

    async def answer(self, times: int) -> str:
        for _ in range(times):
            for rank in range(self.askers):
                number = await self.questions.get(key=rank)
                await self.answers.put(10 * number + rank, key=rank)
        return "served"
