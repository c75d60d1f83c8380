"""The worker's side of the process backend: the main function of a worker's process.

It is imported before anything else, so it imports nothing heavy: signals are in order, and failures can be reported,
before the worker's own module and torch are imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NoReturn

from embodied_rl.channel import base
from embodied_rl.channel.base import run_blocking
from embodied_rl.errors import UserError
from embodied_rl.runtime import signals
from embodied_rl.runtime.cores import THREAD_VARIABLES, pin
from embodied_rl.runtime.numerics import Numerics
from embodied_rl.runtime.worker import ReportProgress, Worker, WorkerContext

is_worker: bool = False
"""This process is a worker of a run."""


class Pickled:
    """Arrives as ``bytes``, for :func:`main` to open when it is ready for an error."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(ForkingPickler.dumps(self._content)),)


class _DriverGone(BaseException):
    """The driver closed the pipe, or died. No ``Exception``, so that no worker takes it for one of its own."""


class _Driver:
    """This end of the pipe. An error of the pipe cannot be mistaken for an error that the worker raised."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        data = ForkingPickler.dumps(message)
        try:
            with self._sending:
                self._pipe.send_bytes(data)
        except OSError:
            raise _DriverGone from None

    def receive(self) -> Any:
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise _DriverGone from None
        return pickle.loads(data)


def main(context: WorkerContext, pickled: bytes, pipe: Connection, parent_pid: int, channels: bytes) -> NoReturn:
    """Build the worker, then answer calls until the driver closes the pipe.

    Args:
        pickled: the worker's class and its arguments.
        parent_pid: of the process that started this one.
        channels: ends of channels over several nodes, which the arguments name by their numbers; None: there are none.
    """
    global is_worker
    is_worker = True
    signals.die_with_parent(parent_pid)
    signals.show_as(context.name)
    os.setpgid(0, 0)  # with its children, so that they can be killed together
    for number in (signal.SIGINT, signal.SIGHUP):  # the driver decides what they mean
        signal.signal(number, signal.SIG_IGN)
    # Some systems send it to all processes of a run, whose last checkpoint needs its workers. Not ignored, which
    # programs that they start would inherit, nor by what they fork, as pools end their processes by it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    signals.unblock()
    faulthandler.enable()
    signals.show_stacks_on_request()
    # For what is imported from here on.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(context.num_threads)))
    # Where workers share cores, a thread that spins until its siblings are done takes the core that they need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.update(context.numerics.environment)
    driver = _Driver(pipe)
    worker: Worker | None = None
    try:
        worker = _build(context, pickled, driver, channels)
        driver.send("ready")
        base.on_wait = lambda what: driver.send("waiting", what)
        DataWatch(lambda: driver.send("alive")).start()
        while True:
            _answer(worker, driver)
    except _DriverGone:
        pass
    except UserError as error:
        _report(driver, True, str(error))
    except BaseException as error:  # an exit() in a worker is a failure too
        _report(driver, False, "".join(traceback.format_exception(error)))
    try:
        if worker is not None:
            worker.close()
    except BaseException:
        traceback.print_exc()
    signals.leave()


def _report(driver: _Driver, by_user: bool, text: str) -> None:
    with contextlib.suppress(_DriverGone):
        driver.send("failure", by_user, text)


def _build(context: WorkerContext, pickled: bytes, driver: _Driver, channels: bytes) -> Worker:
    if context.pinning is not None:
        pin(context.pinning)
    base.over_nodes = pickle.loads(channels) or {}
    worker_class, arguments = pickle.loads(pickled)
    if torch := sys.modules.get("torch"):  # the user's main module may have brought it in before the variables were set
        torch.set_num_threads(context.num_threads)
    if torch or context.numerics != Numerics():  # after the worker's modules, which may have settings of their own
        context.numerics.apply()

    def report_progress(what: str, done: int, total: int, fraction: float | None = None) -> None:
        driver.send("progress", what, done, total, fraction)

    report = context.trace.reporting(rarely(report_progress))
    return worker_class(replace(context, report_progress=report), **arguments)


def _answer(worker: Worker, driver: _Driver) -> None:
    ticket, method, args, kwargs, base.epoch = driver.receive()
    with worker.context.trace.call(method, kwargs.get("step")), worker.context.numerics.explained():
        result = getattr(worker, method)(*args, **kwargs)
        if inspect.iscoroutine(result):  # its channels block, so it never suspends
            result = run_blocking(result)
    driver.send("result", ticket, result)


_REPORT_S: Final = 0.1
"""Reports that follow faster say nothing new to whoever watches."""
_LOOK_S: Final = 1.0
_MOVED_BYTES: Final = 2**20
"""Far more in :data:`_LOOK_S` than waiting takes, far less than any disk or network gives."""


def rarely(report: ReportProgress, clock: Callable[[], float] = time.monotonic) -> ReportProgress:
    """Drop reports that follow another within a tenth of a second, so that each micro-batch can make one.

    What is done is never dropped, nor is the first report of what follows it.
    """
    last = -float("inf")

    def at_most_often(what: str, done: int, total: int, fraction: float | None = None) -> None:
        nonlocal last
        now = clock()
        if done >= total or now - last >= _REPORT_S:
            last = now if done < total else -float("inf")
            report(what, done, total, fraction)

    return at_most_often


class DataWatch:
    """Gives a sign of life while this process reads or writes, as it does in one long call to load or save weights.

    Args:
        sign: called from a thread; an error of its ends the watch.
        moved: bytes that the process has read and written so far.
    """

    def __init__(self, sign: Callable[[], None], moved: Callable[[], int] | None = None) -> None:
        self._sign, self._moved = sign, moved or bytes_moved
        self._last = 0

    def start(self) -> None:
        """Look every second until the process ends."""
        threading.Thread(target=self._run, name="signs of life", daemon=True).start()

    def look(self) -> None:
        """Give the sign if much was moved since the last look."""
        moved = self._moved()
        if moved - self._last >= _MOVED_BYTES:
            self._sign()
        self._last = moved

    def _run(self) -> None:
        try:
            self._last = self._moved()
            while True:
                time.sleep(_LOOK_S)
                self.look()
        except BaseException:  # nobody listens any more, or this system does not count: the calls' reports are left
            return


def bytes_moved() -> int:
    """Bytes that this process has read and written, by system calls and by mapped files.

    Raises:
        OSError: the system does not count them.
    """
    with open("/proc/self/io", encoding="ascii") as counters:
        fields = dict(line.split(": ") for line in counters)
    return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes"))
