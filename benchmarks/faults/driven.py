"""A run in a process of its own, forked from this one, which has imported everything, and what it leaves behind."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks.faults.nodes import Nodes

_PR_SET_CHILD_SUBREAPER: Final = 36
"""linux/prctl.h"""
_SHM: Final = Path("/dev/shm")
_PATIENCE_S: Final = 5.0
"""Time for what a run started to notice its end."""
NODES_PATIENCE_S: Final = 30.0
"""The same, on other nodes: their workers have 15 s to close."""


def adopt_orphans() -> None:
    """Processes whose parent dies become this one's children, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Driven:
    """``python train.py <arguments>``, with output to a file, and temporary files in a folder of its own.

    Args:
        nodes: those on which its workers are.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], nodes: Nodes | None = None
    ) -> None:
        self.folder, self._nodes = folder, nodes
        self.temporary = Path(tempfile.mkdtemp(prefix="faults-"))  # short: sockets have their place in it
        self.output = folder / "output.txt"
        self._before = {path.name for path in _SHM.iterdir()}
        self._offset = self.output.stat().st_size if self.output.exists() else 0
        """Where this run's output begins: those of one case share the file."""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(arguments, environment)
        self._status: int | None = None
        self._killed: set[int] = set()

    def _be(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # a shell or nohup may have them ignored
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.update(environment, TMPDIR=str(self.temporary))
            tempfile.tempdir = None
            out = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
                os.dup2(fd, target)
            from embodied_rl.cli import main

            if self._nodes is not None:
                self._nodes.prepare()
            main(arguments)
            status = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Exit status, negative for a signal, or None while it goes on."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, seconds: float) -> int | None:
        """As :meth:`poll`, after its end or so many seconds."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll()

    def workers(self, group: str) -> list[psutil.Process]:
        """Its living workers of a group."""
        found = []
        for process in _descendants(self.pid if self._nodes is None else os.getpid()):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith(group):
                    found.append(process)
        return found

    def said(self) -> str:
        """All that this run printed, without line breaks."""
        if not self.output.exists():
            return ""
        with self.output.open("rb") as file:
            file.seek(self._offset)
            return re.sub(r"\s+", " ", file.read().decode(errors="replace"))

    def kill(self) -> None:
        """End it, and all that it started."""
        for process in _descendants(self.pid):
            _end(process)
        os.kill(self.pid, signal.SIGKILL)
        self.wait(_PATIENCE_S)

    def leftovers(self) -> list[str]:
        """What it left behind: processes, shared memory and temporary files. Ends and removes them."""
        deadline = time.monotonic() + (_PATIENCE_S if self._nodes is None else NODES_PATIENCE_S)
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in self._own():
            _end(process)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return found

    def _own(self) -> list[psutil.Process]:
        below = _descendants(os.getpid())
        return below if self._nodes is None else [p for p in below if not self._nodes.has(p)]

    def _left(self) -> list[str]:
        processes = self._own()
        shared = {path.name for path in _SHM.iterdir()} - self._before
        shared = {name for name in shared if name.startswith(("torch_", "psm_", "sem.", "embodied"))}
        files = [path.name for path in self.temporary.iterdir() if path.name.startswith("embodied_rl-")]
        if self._status == -signal.SIGKILL:  # documented: nobody is left to remove it
            files = []
        return (
            [f"process {_shown(p)}" for p in processes]
            + [f"shared memory {name}" for name in sorted(shared - _mapped_elsewhere(shared))]
            + [f"temporary {name}" for name in files]
        )


def _descendants(pid: int) -> list[psutil.Process]:
    """Living processes below one; where it is this one, those that have ended are buried."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
    return found


def _shown(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.name()} ({process.status()})"
    return str(process.pid)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _mapped_elsewhere(names: set[str]) -> set[str]:
    """Those that other processes of the machine use."""
    if not names:
        return set()
    own = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    found: set[str] = set()
    for pid in set(psutil.pids()) - own:
        try:
            found.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue
    return found
