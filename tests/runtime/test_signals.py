from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from embodied_rl.runtime import signals
from tests.runtime.conftest import alive


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []

    def interrupted() -> None:
        with signals.deferred() as caught:
            signal.raise_signal(signal.SIGINT)
            assert caught == [signal.SIGINT]
            done.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_does_not_replace_an_exception() -> None:
    def interrupted() -> None:
        with signals.deferred():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        interrupted()


def test_nothing_happens_where_nothing_came() -> None:
    with signals.deferred() as caught:
        pass
    assert not caught


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.deferred() as caught:
            signal.raise_signal(signal.SIGINT)
        assert not caught
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_need_no_deferring() -> None:
    seen: list[list[int]] = []

    def work() -> None:
        with signals.deferred() as caught:
            seen.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]


def test_children_get_no_signal_until_they_unblock() -> None:
    script = (
        "import os, signal; from embodied_rl.runtime import signals\n"
        "os.kill(os.getpid(), signal.SIGINT); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signals.unblock(); print('lives'); signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    with signals.blocked_in_children():
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.communicate(timeout=60)[0] == "lives\n"
    assert child.returncode == -signal.SIGINT
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_dies_with_its_parent() -> None:
    child = (
        "import os, sys, time; from embodied_rl.runtime import signals\n"
        "signals.die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    assert not alive(pid, patience=3)


def test_a_process_whose_parent_is_dead_already_ends() -> None:
    script = "from embodied_rl.runtime import signals; signals.die_with_parent(1 << 22); print('survived')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert os.getppid() != 1 << 22


BUSY = """
import os, sys, threading
from embodied_rl.runtime import signals

def dive(depth):
    return depth and 1 + dive(depth - 1)

def work():
    while True:
        dive(400)

def spawn():
    while True:
        threads = [threading.Thread(target=dive, args=(300,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

def wait():
    print("ready", flush=True)
    held.acquire(timeout=2)

held = threading.Lock()
held.acquire()
for target in (work, work, spawn):
    threading.Thread(target=target, name=f"one to {target.__name__}", daemon=True).start()
if sys.argv[1] == "driver":
    with signals.stacks_on_request(lambda: signals.say("the others\\\\n")):
        wait()
else:
    signals.show_stacks_on_request()
    wait()
os._exit(0)
"""


@pytest.mark.parametrize("process", ["driver", "worker"])
def test_a_request_for_stacks_ends_no_process(process: str) -> None:
    """Its threads start, dive and end while their stacks are read, and its main thread waits for a lock."""
    command = [sys.executable, "-c", BUSY, process]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None and asked.stdout.readline() == "ready\n"

        def ask() -> None:
            while asked.poll() is None:
                asked.send_signal(signal.SIGUSR1)
                time.sleep(0.01)

        asking = threading.Thread(target=ask)
        asking.start()
        _, shown = asked.communicate()
        asking.join()
    assert asked.returncode == 0
    assert re.search(r'Stack \(most recent call first\):\n  File "<string>", line \d+ in wait\n', shown)
    assert re.search(r"Thread one to work \(most recent call last\):\n  File[\s\S]*, in work\n", shown)
    assert ("the others" in shown) == (process == "driver")
