"""However a run of processes ends, nothing is left: the fixture ``make_backend`` looks for processes and files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.channel.base import ChannelClosed, run_blocking
from embodied_rl.runtime import process
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import WorkerError, WorkerProgress
from tests.leftovers import left_since, shared_files
from tests.runtime.conftest import alive
from tests.runtime.test_process import probes, spec
from tests.runtime.workers import Probe

pytestmark = pytest.mark.cold_start
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert least <= time.monotonic() - start <= most


def closed(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.closed")}


def test_after_success_workers_close_and_channels_end(backend: ProcessBackend, tmp_path: Path) -> None:
    channel = backend.channel("questions", (0,), 1)
    group = probes(backend, 2, folder=tmp_path)
    pids = [identity[4] for identity in group.call(Probe.identity).wait()]
    with takes(0, 4):
        backend.shutdown()
    assert closed(tmp_path) == {"probe[0]", "probe[1]"}
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(ChannelClosed, match="the run is over"):
        run_blocking(channel.get())
    backend.shutdown()


def test_semaphores_go_with_their_workers(backend: ProcessBackend) -> None:
    """Or multiprocessing's resource tracker warns of leaked ones, on the user's terminal."""
    before = shared_files()
    group = probes(backend, 2)
    group.call(Probe.lock).wait()
    assert len(shared_files() - before) >= 2
    backend.shutdown()
    assert not left_since(before)


def test_after_an_error_workers_close(backend: ProcessBackend, tmp_path: Path) -> None:
    failing, idle = backend.launch([spec("failing", Probe, folder=tmp_path), spec("idle", Probe, folder=tmp_path)])
    idle.call(Probe.identity).wait()
    with pytest.raises(WorkerError):
        failing.call(Probe.fail).wait()
    with takes(0, 4):
        backend.shutdown()
    assert closed(tmp_path) == {"failing[0]", "idle[0]"}


def test_after_ctrl_c(backend: ProcessBackend, tmp_path: Path) -> None:
    def interrupt(progress: WorkerProgress) -> None:
        if progress.total:
            signal.raise_signal(signal.SIGINT)

    group = probes(backend, folder=tmp_path)
    backend.on_progress(interrupt)
    group.call(Probe.live, 1.0)
    with pytest.raises(KeyboardInterrupt):
        group.call(Probe.identity).wait()
    with takes(0, 4):
        backend.shutdown()
    assert closed(tmp_path) == {"probe[0]"}  # its next progress report met a closed pipe


def test_while_workers_start_nobody_waits_for_them(backend: ProcessBackend) -> None:
    backend.launch([spec("slow", Probe, 2, build_seconds=600.0)])
    with takes(0, 3):
        backend.shutdown()


def test_what_was_never_asked_for_holds_nobody_up(backend: ProcessBackend, tmp_path: Path) -> None:
    """A worker whose messages nobody reads is blocked in the pipe."""
    group = probes(backend, folder=tmp_path)
    group.call(Probe.count, 1_000_000)
    time.sleep(0.5)
    with takes(0, 4):
        backend.shutdown()
    assert closed(tmp_path) == {"probe[0]"}


def test_a_worker_in_a_long_step_that_ignores_sigterm_is_killed(
    backend: ProcessBackend, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GRACE_S", 3.0)
    deaf, polite = backend.launch([spec("deaf", Probe), spec("polite", Probe, folder=tmp_path)])
    polite.call(Probe.identity).wait()
    heard = threading.Event()
    backend.on_progress(lambda progress: heard.set() if progress.total else None)
    deaf.call(Probe.sleep_deaf)
    while not heard.is_set():
        polite.call(Probe.identity).wait()
    with takes(process._GRACE_S, process._GRACE_S + 2):
        backend.shutdown()
    assert closed(tmp_path) == {"polite[0]"}
    assert capfd.readouterr().err == "waiting 3 s at most for deaf[0] to close; Ctrl-C: at once\n"


class Dying:
    """A process that was killed, and whose memory the system frees for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.name, self.pid, self.process = "envs[0]", 4711, self
        self._end = time.monotonic() + seconds
        self.closed = False

    @property
    def running(self) -> bool:
        return time.monotonic() < self._end

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, r"^$"),
        (0.5, r"^envs\[0\] is still ending: the system frees its memory\n$"),
        (9.0, r"^envs\[0\] is still ending.*\nenvs\[0\] \(process 4711\) was killed 1 s ago and is still there, stuck"),
    ],
)
def test_a_process_may_take_time_to_die(
    backend: ProcessBackend,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seconds: float,
    said: str,
) -> None:
    monkeypatch.setattr(process, "_KILL_S", 0.2)
    monkeypatch.setattr(process, "_STUCK_S", 1.0)
    dying = Dying(seconds)
    backend._processes.append(dying)  # type: ignore[arg-type]
    backend._reap()
    assert re.search(said, capfd.readouterr().err)
    assert dying.closed == (seconds < 1.0)


@pytest.mark.parametrize("start_child", [Probe.start_child, Probe.fork_child])
@pytest.mark.parametrize("end", [Probe.identity, Probe.kill_self], ids=["closed", "killed"])
@pytest.mark.usefixtures("short_grace")
def test_processes_that_a_worker_started_go_with_it(
    backend: ProcessBackend, start_child: Callable[..., Any], end: Callable[..., Any]
) -> None:
    group = probes(backend)
    [child] = group.call(start_child).wait()
    assert alive(child)
    if end is Probe.kill_self:
        with pytest.raises(WorkerError):
            group.call(end).wait()
    backend.shutdown()
    assert not alive(child, patience=2)


def test_another_ctrl_c_hurries_the_shutdown_and_is_not_lost(backend: ProcessBackend) -> None:
    group = probes(backend)
    group.call(Probe.sleep)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with takes(0.5, 3), pytest.raises(KeyboardInterrupt):
        backend.shutdown()
    timer.join()


def test_another_ctrl_c_does_not_hide_the_error_that_ended_the_run(backend: ProcessBackend) -> None:
    sleeping, failing = backend.launch([spec("sleeping", Probe), spec("failing", Probe)])
    sleeping.call(Probe.identity).wait()
    sleeping.call(Probe.sleep)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))

    def run() -> None:
        try:
            failing.call(Probe.fail).wait()
        finally:
            backend.shutdown()

    failing.call(Probe.identity).wait()
    timer.start()
    with takes(1.5, 5), pytest.raises(WorkerError, match="the gripper is stuck"):
        run()
    timer.join()


DRIVER = """\
from pathlib import Path
from embodied_rl.runtime.process import ProcessBackend
from embodied_rl.runtime.worker import GroupSpec
from tests.runtime.workers import Probe
backend = ProcessBackend(100.0)
probe = dict(name="probe", worker=Probe, num_threads=1)
"""


@contextmanager
def drive(tmp_path: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a driver of its own. Its workers import its file too, but not as ``__main__``."""
    path = tmp_path / "driver.py"
    path.write_text("if __name__ == '__main__':\n    " + script.replace("\n", "\n    "))
    driver = subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with driver:
        try:
            yield driver
        finally:
            driver.kill()


def test_workers_die_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    script = DRIVER + (
        "group = backend.launch([GroupSpec(**probe, arguments={}, devices=['cpu'] * 2)])[0]\n"
        "print(*(identity[4] for identity in group.call(Probe.identity).wait()), flush=True)\n"
        "group.call(Probe.sleep).wait()\n"
    )
    with drive(tmp_path, script) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        driver.kill()
    assert not any(alive(pid, patience=3) for pid in pids)


def test_a_driver_that_forgets_the_shutdown_ends_nevertheless(tmp_path: Path) -> None:
    script = DRIVER + (
        f"arguments = dict(folder=Path({str(tmp_path)!r}))\n"
        "group = backend.launch([GroupSpec(**probe, arguments=arguments, devices=['cpu'])])[0]\n"
        "print(group.call(Probe.add, 7).wait())\n"
    )
    with drive(tmp_path, script) as driver:
        output, errors = driver.communicate(timeout=60)
    assert (driver.returncode, output, errors) == (0, "[7]\n", "")
    assert closed(tmp_path) == {"probe[0]"}
    assert not list(tmp_path.glob("embodied_rl-*"))
