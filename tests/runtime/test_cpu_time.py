"""CPU time of processes, by processes that work for a known time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from embodied_rl.runtime import cpu_time
from embodied_rl.runtime.cpu_time import CpuTimes, cpu_seconds
from embodied_rl.runtime.load import usable_cores

WORK = """
import sys, time
def work():
    while time.process_time() < 0.2: pass
"""
ALONE = f"{WORK}\nwork(); print('done', flush=True); sys.stdin.read()"
WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline(); print('done', flush=True)
sys.stdin.readline(); child.communicate(); print('ended', flush=True); sys.stdin.read()
"""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for children each time."""
    monkeypatch.setattr(cpu_time, "_EVERY_S", 0.0)


@pytest.fixture(params=[(ALONE,), (WITH_CHILD, ALONE)], ids=["alone", "in a child"])
def worker(request: pytest.FixtureRequest) -> Iterator[Popen[bytes]]:
    command = [sys.executable, "-c", *request.param]
    with Popen(command, stdin=PIPE, stdout=PIPE, process_group=0) as process:
        assert process.stdout and process.stdout.readline()
        yield process
        process.kill()


def test_seconds_of_a_worker_and_what_it_started(worker: Popen[bytes], now: None) -> None:
    times = CpuTimes()
    times.add("Env[0]", worker.pid)
    first = times.read()["Env[0]"]
    assert 0.2 <= first < 10
    time.sleep(0.05)
    assert times.read()["Env[0]"] - first < 0.05, "it sleeps"
    worker.communicate()
    assert times.read()["Env[0]"] >= first, "what is gone has worked all the same"


def test_a_worker_in_the_place_of_another_goes_on_with_its_name(now: None) -> None:
    times, totals = CpuTimes(), []
    for _ in range(2):
        with Popen([sys.executable, "-c", ALONE], stdin=PIPE, stdout=PIPE, process_group=0) as process:
            times.add("Env[0]", process.pid)
            assert process.stdout and process.stdout.readline()
            totals.append(times.read()["Env[0]"])
            process.communicate()
        assert cpu_seconds(process.pid) is None
    assert totals[0] + 0.2 <= totals[1]


def test_a_child_that_has_ended_still_counts(now: None) -> None:
    command = [sys.executable, "-c", WITH_CHILD, ALONE]
    with Popen(command, stdin=PIPE, stdout=PIPE, process_group=0) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        times = CpuTimes()
        times.add("Reward[0]", process.pid)
        before = times.read()["Reward[0]"]
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ended\n"
        assert times.read()["Reward[0]"] >= before
        process.kill()


def test_strangers_do_not_count(now: None) -> None:
    times = CpuTimes()
    with Popen([sys.executable, "-c", ALONE], stdin=PIPE, stdout=PIPE, process_group=0) as process:
        assert process.stdout and process.stdout.readline()
        assert times.read() == {}
        process.kill()


def test_cores_by_affinity_and_quota(tmp_path: Path) -> None:
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    script += "from pathlib import Path\nfrom embodied_rl.runtime.load import usable_cores\n"
    for content, cores in (("max 100000", 1.0), ("50000 100000", 0.5), ("400000 100000", 1.0), (None, 1.0)):
        quota = tmp_path / str(cores) / str(content)
        quota.parent.mkdir(exist_ok=True)
        if content is not None:
            quota.write_text(f"{content}\n")
        script += f"assert usable_cores(Path({str(quota)!r})) == {cores}\n"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert usable_cores() >= 1
