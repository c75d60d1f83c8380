"""What decides whether a test has left shared memory behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.leftovers import left_since, shared_files

KILLED = """
import multiprocessing, os, signal
multiprocessing.set_start_method("spawn")
lock = multiprocessing.RLock()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_leak_is_found() -> None:
    before = shared_files()
    with subprocess.Popen([sys.executable, "-c", KILLED]) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        try:
            assert len(left_since(before, patience=0.2)) == 1
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_other_processes_of_the_suite_have_another_shared_memory() -> None:
    assert os.stat("/dev/shm").st_dev != os.stat(f"/proc/{os.getppid()}/root/dev/shm").st_dev
