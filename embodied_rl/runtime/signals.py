"""Signals around workers: none is lost, none strikes half-way, and nobody outlives the driver."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class Terminated(SystemExit):
    """The process was asked to end, by SIGTERM or because its terminal was closed (SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.word = "terminal closed" if number == signal.SIGHUP else "terminated"


class _Terminate:
    """Handler of SIGTERM and SIGHUP that raises :class:`Terminated`."""

    def __init__(self) -> None:
        self._terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGHUP:  # every line to the terminal, which is gone, would be an error
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in self._terminals:
                os.dup2(nowhere, fd)
            os.close(nowhere)
        raise Terminated(number)


def raises(number: int) -> bool:
    """Whether the signal raises KeyboardInterrupt or :class:`Terminated` now."""
    handler = signal.getsignal(number)
    return handler is signal.default_int_handler or isinstance(handler, _Terminate)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM and SIGHUP, so that they end a run as Ctrl-C does.

    Python lets the main thread alone do so; what is ignored (by ``nohup``) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    terminate = _Terminate()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in caught:
            signal.signal(number, terminate)
        yield
    finally:
        for number in caught:
            signal.signal(number, previous[number])


@contextlib.contextmanager
def said() -> Iterator[None]:
    """As :func:`terminable`; say by which signal the block ended, and exit with 128 plus its number."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Terminated as ending:
        print(ending.word, file=sys.stderr)
        sys.exit(ending.code)


@contextlib.contextmanager
def stacks_on_request(others: Callable[[], None]) -> Iterator[None]:
    """In the block, SIGUSR1 prints the stack of every thread of this process, and calls ``others``, which asks other
    processes for theirs. Outside the main thread there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    answering = threading.Lock()

    def answer(*_: object) -> None:
        if answering.acquire(blocking=False):  # not for what is asked again meanwhile, which would nest
            try:
                _show_other_threads()
                others()
            finally:
                answering.release()

    before = signal.signal(signal.SIGUSR1, answer)
    _show_main_thread()
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)


def show_stacks_on_request() -> None:
    """Let SIGUSR1 print the stack of every thread of this process for good, even while the main thread waits for a
    lock. A worker's main thread calls it; a driver has :func:`stacks_on_request`."""
    requests, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a signal without one of Python's handlers wakes nobody up
    _show_main_thread()

    def watch() -> None:
        while True:
            if signal.SIGUSR1 in os.read(requests, 1):
                _show_other_threads()

    threading.Thread(target=watch, name="stacks", daemon=True).start()


def _show_main_thread() -> None:
    """Let SIGUSR1 print the main thread's stack at once, also while it is in C.

    The others' are not for faulthandler: it reads them without the GIL, while these threads go on, which ended the
    process by SIGSEGV once in about a hundred requests.
    """
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)


def _show_other_threads() -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    hidden = {threading.get_ident(), threading.main_thread().ident}
    for ident, frame in sys._current_frames().items():
        if ident not in hidden:
            stack = "".join(traceback.format_stack(frame))
            say(f"Thread {names.get(ident, ident)} (most recent call last):\n{stack}")


def say(text: str) -> None:
    """Write to the terminal from a signal handler, which may have interrupted a write to ``sys.stderr``."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP in the list it gives, instead of raising in the middle of the block.

    At the end the first one noted is raised after all, unless an exception is on its way already, which must not be
    replaced. Outside the main thread there is nothing to do: Python runs handlers there only.
    """
    caught: list[int] = []
    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    previous[number] = signal.signal(number, lambda number, _: caught.append(number))
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if caught and sys.exc_info()[0] is None:
            signal.raise_signal(caught[0])


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes started in the block have these signals pending, not delivered, until they :func:`unblock`.

    Otherwise Ctrl-C, which goes to the whole terminal, prints a traceback from each child that is still importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """In a process started under :func:`blocked_in_children`, when its handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies. Linux only.

    Children do not inherit this. A worker's own child processes call it too (``os.getppid()`` at their start), if they
    must not survive a driver that is killed by SIGKILL. "Parent" is the thread that started the process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def show_as(name: str) -> None:
    """Name this process in ``ps`` and ``top``; Linux keeps 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def leave() -> NoReturn:
    """End this process at once, without the interpreter's own end and without named semaphores left behind.

    The interpreter's end takes a second where torch is loaded, and simulators crash in it. What multiprocessing would
    have freed there (a lock that tqdm made, for one) its resource tracker would report as leaked.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue] not in typeshed
    os._exit(0)
