"""A process that was forked from a warm one is as one that was spawned."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from embodied_rl.runtime import signals
from tests import warm_start

SPAWN = mp.get_context("spawn")


def tell(pipe: Connection, parent: int) -> None:
    signals.die_with_parent(parent)
    print("said", flush=True)
    files = {int(name) for name in os.listdir("/proc/self/fd")}
    pipe.send(
        {
            "forked": warm_start.forked,
            "torch": "torch" in sys.modules,
            "parent": os.getppid(),
            "variable": os.environ.get("SOME_VARIABLE"),
            "directory": os.getcwd(),
            "blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "files": len(files),
        }
    )
    pipe.recv()
    sys.exit(7)


def start() -> tuple[Any, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=tell, args=(theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


def found(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    resource_tracker.ensure_running()  # else it starts now, and unblocks signals
    with signals.blocked_in_children():
        process, pipe = start()
    told = pipe.recv()
    assert process.pid in {child.pid for child in psutil.Process().children()}
    assert capfd.readouterr().out == "said\n"
    pipe.send("end")
    process.join(20)
    assert process.exitcode == 7
    return told


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.cold_start)])
def test_it_has_what_its_parent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cold: bool
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "7")
    monkeypatch.chdir(tmp_path)
    expected = {"parent": os.getpid(), "variable": "7", "directory": str(tmp_path), "blocked": True, "interrupt": True}
    told = found(capfd)
    assert told.pop("files") <= 9, "descriptors of its own alone"
    assert told.pop("torch") is not cold
    assert told == {**expected, "forked": not cold}


def test_a_signal_is_its_exit_code() -> None:
    process, pipe = start()
    pipe.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


def test_orphans_of_others_stay_away() -> None:
    """Adoption ends with the start: else processes that a killed worker leaves would be this one's to wait for."""
    script = "import os, time\nif os.fork() == 0:\n  time.sleep(0.3)\n  os._exit(0)\nos._exit(0)"
    process, pipe = start()
    before = len(psutil.Process().children())
    subprocess.run([sys.executable, "-c", script], check=True)
    time.sleep(0.05)
    assert len(psutil.Process().children()) == before
    pipe.recv()
    pipe.send("end")
    process.join(20)
