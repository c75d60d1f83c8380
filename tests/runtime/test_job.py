"""A whole training job, as a user starts and ends it."""

from __future__ import annotations

import functools
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

import psutil
import pytest

from tests.leftovers import left_since, shared_files
from tests.runtime.conftest import alive

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # until something appears on the screen; only a failing test waits as long
PROMPT = 30.0  # seconds for an end; 1 to 4 on a machine with nothing else to do


class Job:
    """``train.py`` in a terminal of its own, which the test types into and reads."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.openpty()
        self.terminal, self.screen = ours, ""
        overrides = "env=dummy runner.max_steps=100000 runner.save_interval=-1 cluster.num_threads.actor=1"
        self.process = subprocess.Popen(
            [sys.executable, "train.py", *overrides.split(), f"runner.output_dir={folder}"],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "TMPDIR": str(folder)},
            preexec_fn=functools.partial(os.login_tty, theirs),  # so that ^C is a Ctrl-C, for all its processes
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with open(self.terminal, "rb", buffering=0, closefd=False) as screen:
            try:
                while data := screen.read(65536):
                    self.screen += data.decode(errors="replace")
            except OSError:  # the last process that had the terminal is gone
                return

    def until(self, seen: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not seen():
            assert self.process.poll() is None, f"ended without {what}:\n{self.screen}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.screen}"
            time.sleep(0.02)

    def workers(self) -> dict[str, int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {child.name(): child.pid for child in children if "Group[" in child.name()}

    def end(self) -> tuple[int, list[str], float]:
        """Exit status, the plain lines that were printed after the bar, and how long the end took."""
        start = time.monotonic()
        status = self.process.wait(PATIENCE)
        seconds = time.monotonic() - start
        self._reader.join(PATIENCE)
        last = self.screen.rpartition("\x1b[?25h")[2]
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).replace("^C", "")  # the terminal's echo of the key
        return status, [line.strip() for line in plain.split("\r\n") if line.strip()], seconds


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    files = shared_files()
    job = Job(tmp_path)
    try:
        yield job
        assert not left_since(files)
        assert not list(tmp_path.glob("embodied_rl-*"))
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        os.close(job.terminal)


@contextmanager
def nothing_left_of(job: Job) -> Iterator[None]:
    everything = [child.pid for child in psutil.Process(job.process.pid).children(recursive=True)]
    yield
    assert not [pid for pid in everything if alive(pid, patience=2)]


def training(job: Job) -> None:
    job.until(lambda: f"{2:>6}  " in job.screen, "second step")  # its row


def test_ctrl_c(job: Job) -> None:
    training(job)
    assert set(job.workers()) == {"EnvGroup[0]", "EnvGroup[1]", "RolloutGroup[0]", "ActorGroup[0]"}
    with nothing_left_of(job):
        os.write(job.terminal, b"\x03")
        status, lines, seconds = job.end()
    assert status == 130
    assert re.match(r"stopped at step \d+/100000, elapsed 0:0\d:\d\d$", lines[0]), lines
    assert lines[1].startswith("report:") and lines[-1] == "interrupted", lines
    assert "Traceback" not in job.screen
    assert job.screen.count("\x1b[?25l") == job.screen.count("\x1b[?25h") > 0  # the cursor is back
    assert seconds < PROMPT


def test_sigterm(job: Job) -> None:
    training(job)
    with nothing_left_of(job):
        job.process.terminate()
        status, lines, seconds = job.end()
    assert status == 143
    assert re.match(r"stopped at step \d+/100000, elapsed 0:0\d:\d\d$", lines[0]), lines
    assert lines[1].startswith("report:") and lines[-1] == "terminated", lines
    assert "Traceback" not in job.screen
    assert job.screen.count("\x1b[?25l") == job.screen.count("\x1b[?25h") > 0
    assert seconds < PROMPT


def test_stacks_on_request(job: Job) -> None:
    """SIGUSR1 shows what every process does, and the run goes on."""
    training(job)
    os.kill(job.process.pid, signal.SIGUSR1)
    for name in ("EnvGroup[0]", "EnvGroup[1]", "RolloutGroup[0]", "ActorGroup[0]"):
        job.until(lambda name=name: f"--- stack of {name} ---" in job.screen, name)
    job.until(lambda: "launch.py" in job.screen and "process_worker.py" in job.screen, "frames")
    job.until(lambda: f"{9:>6}  " in job.screen, "ninth step")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end()[0] == 143


def test_the_terminal_is_closed(job: Job, tmp_path: Path) -> None:
    training(job)
    [log] = tmp_path.rglob("run.log")
    with nothing_left_of(job):
        os.dup2(os.open(os.devnull, os.O_RDWR), job.terminal)  # the last descriptor of our side
        assert job.process.wait(PATIENCE) == 128 + signal.SIGHUP
    assert "terminal closed: " in log.read_text()


def test_sigterm_in_the_first_second(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "env=dummy", f"runner.output_dir={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        caught = 0
        while not caught & 1 << (signal.SIGTERM - 1):  # before that it is Python itself that starts
            assert process.poll() is None
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        process.terminate()
        assert process.stderr is not None
        assert process.stderr.read() == "terminated\n"
        assert process.wait(PATIENCE) == 143


def test_an_env_worker_is_replaced(job: Job) -> None:
    training(job)
    victim = job.workers()["EnvGroup[1]"]
    with nothing_left_of(job):
        os.kill(victim, signal.SIGKILL)
        job.until(lambda: "its rollout is made again" in job.screen, "word of the death")
        start, last = time.monotonic(), job.screen.count("ms ")
        job.until(lambda: job.workers().get("EnvGroup[1]", victim) != victim, "another one")
        job.until(lambda: job.screen.count("ms ") > last + 20, "further steps")
        assert time.monotonic() - start < 60
        os.write(job.terminal, b"\x03")
        status, lines, seconds = job.end()
    assert status == 130, lines
    assert "Traceback" not in job.screen
    assert seconds < PROMPT


def test_a_worker_is_killed(job: Job) -> None:
    training(job)
    victim = job.workers()["RolloutGroup[0]"]
    with nothing_left_of(job):
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        job.until(lambda: "SIGKILL" in job.screen, "word of the death")
        assert time.monotonic() - start < 20
        status, lines, seconds = job.end()
    assert status == 1
    assert f"error: RolloutGroup[0] (process {victim}) was killed by SIGKILL (signal 9); if nobody did that" in "".join(
        lines
    )
    assert "Traceback" not in job.screen
    assert seconds < PROMPT


@pytest.mark.parametrize("workers", [0, 1, 4], ids=["none", "one", "all"])
def test_ctrl_c_while_workers_start(job: Job, workers: int) -> None:
    def started(child: psutil.Process) -> bool:
        try:
            return "spawn_main" in "".join(child.cmdline())
        except psutil.NoSuchProcess:  # a helper of the start that is gone, or not reaped yet
            return False

    def spawned() -> int:
        return sum(map(started, psutil.Process(job.process.pid).children()))

    job.until(lambda: "run directory" in job.screen and spawned() >= workers, "start of the workers")
    with nothing_left_of(job):
        os.write(job.terminal, b"\x03")
        status, lines, seconds = job.end()
    assert status == 130
    assert lines[-1] == "interrupted", lines
    assert "Traceback" not in job.screen and "KeyboardInterrupt" not in job.screen
    assert seconds < PROMPT
