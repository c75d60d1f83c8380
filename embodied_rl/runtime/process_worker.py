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
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from embodied_rl.channel.cooperative import run_blocking
from embodied_rl.errors import UserError
from embodied_rl.runtime import signals
from embodied_rl.runtime.signs_of_life import DataWatch, rarely
from embodied_rl.runtime.worker import Worker, WorkerContext

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Sealed:
    """What to build a worker from. Arrives as ``bytes``, for :func:`main` to open when it is ready for an error."""

    def __init__(self, worker: Callable[..., Worker], arguments: Mapping[str, Any]) -> None:
        self._content = (worker, dict(arguments))

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


def main(context: WorkerContext, sealed: bytes, pipe: Connection, driver_pid: int) -> NoReturn:
    """Build the worker, then answer calls until the driver closes the pipe."""
    signals.die_with_parent(driver_pid)
    signals.show_as(context.name)
    os.setpgid(0, 0)  # with its children, so that they can be killed together
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C means
    signals.unblock()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # For what is imported from here on.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(context.num_threads)))
    # Where workers share cores, a thread that spins until its siblings are done takes the core that they need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    driver = _Driver(pipe)
    worker: Worker | None = None
    try:
        worker = _build(context, sealed, driver)
        driver.send("ready")
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


def _build(context: WorkerContext, sealed: bytes, driver: _Driver) -> Worker:
    worker_class, arguments = pickle.loads(sealed)
    if torch := sys.modules.get("torch"):  # the user's main module may have brought it in before the variables were set
        torch.set_num_threads(context.num_threads)

    def report_progress(what: str, done: int, total: int) -> None:
        driver.send("progress", what, done, total)

    return worker_class(replace(context, report_progress=rarely(report_progress)), **arguments)


def _answer(worker: Worker, driver: _Driver) -> None:
    ticket, method, args, kwargs = driver.receive()
    result = getattr(worker, method)(*args, **kwargs)
    if inspect.iscoroutine(result):  # its channels block, so it never suspends
        result = run_blocking(result)
    driver.send("result", ticket, result)
