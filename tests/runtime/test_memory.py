from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from embodied_rl.runtime import memory
from embodied_rl.runtime.memory import GIB, Held, MemoryWatch, held, held_by_workers, table, together


def test_what_processes_share_is_counted_once() -> None:
    """Two of 3 GiB that share one, and one of 1 GiB that shares half: 2 + 2 + 0.5, and 1 for what is shared."""
    a, b, c = Held(3, 1), Held(3, 1), Held(1, 0)
    assert together([a, b, c]) == Held(2 + 2 + 1 + 1, 1)
    assert together([together([a, b]), c]) == together([a, b, c]), "some of them as one"
    assert together([]) == Held(0, 0)


def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    # In a process of its own: where memory is short the system takes pages of a large one meanwhile.
    script = (
        "import os, numpy; from embodied_rl.runtime.memory import held; before = held(os.getpid());"
        "kept = numpy.ones(2**27, numpy.uint8); print(held(os.getpid()).resident - before.resident)"
    )
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(grown) == pytest.approx(2**27, rel=0.3)
    assert held(2**22 + 1) == Held(0, 0), "nobody"


LARGE = "import sys; kept = b'x' * 2**28; print(flush=True); sys.stdin.read()"
WITH_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_worker_counts_with_what_it_started() -> None:
    with Popen([sys.executable, "-c", WITH_CHILD, LARGE], stdin=PIPE, stdout=PIPE, process_group=0) as worker:
        assert worker.stdout and worker.stdout.readline()
        assert held(worker.pid).resident < 2**27
        found = held_by_workers([worker.pid, os.getpid()])
        assert 2**28 <= found[worker.pid].resident < 2**29
        assert found[os.getpid()].resident < 2**28 + held(os.getpid()).resident, "it is not counted twice"
        limit = (held(os.getpid()).resident + 2**27) / GIB
        complaint = MemoryWatch(limit).look({"Env[0]": worker.pid})
        assert complaint is not None and re.search(r"Env\[0\]: 0\.[234]\d GiB", complaint)
        worker.communicate()
    assert held_by_workers([worker.pid]) == {worker.pid: Held(0, 0)}, "it is gone"


def test_pages_of_a_fork_are_counted_once() -> None:
    """A worker whose children have its 256 MiB by forking, and nothing to speak of themselves."""
    script = (
        "import os, sys; kept = b'x' * 2**28\n"
        "first = all([os.fork() for _ in range(3)])\n"
        "if first: print(flush=True)\n"
        "sys.stdin.read()"
    )
    with Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, process_group=0) as worker:
        assert worker.stdout and worker.stdout.readline()
        assert 2**28 <= held_by_workers([worker.pid])[worker.pid].resident < 1.5 * 2**28
        worker.communicate()


def test_the_largest_comes_first() -> None:
    shown = table({"small": Held(GIB // 2, 0), "large": Held(2 * GIB, 0)})
    assert shown == "  large: 2.00 GiB\n  small: 0.50 GiB"


def test_a_killed_process_is_told_of_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 7\noom_kill 4\n")
    monkeypatch.setattr(memory, "_VMSTAT", counts)
    watch = MemoryWatch(limit=None)
    assert watch.of_killed("Env[0]") == "if nobody did that, the system ran out of memory: use fewer envs or workers"
    assert watch.look({"Env[0]": os.getpid()}) is None
    words = watch.of_killed("Env[0]")
    assert "when last looked at it held " in words and "held 0.00 GiB" not in words
    monkeypatch.setattr(memory, "_EVERY_S", 0.0)
    assert watch.look({"Env[0]": 2**22 + 1}) is None, "it is gone by now"
    assert watch.of_killed("Env[0]") == words
    counts.write_text("nr_free_pages 7\noom_kill 6\n")
    assert watch.of_killed("Env[0]").startswith("the system has killed 2 process(es) since for want of memory: use")
    counts.unlink()
    assert "the system ran out of memory" in watch.of_killed("Env[0]")


def test_a_limit_is_of_all_together_with_the_driver() -> None:
    own = held(os.getpid()).resident / GIB
    assert MemoryWatch(limit=10 * own).look({"Env[0]": os.getpid()}) is None
    complaint = MemoryWatch(limit=own / 2).look({"Env[0]": os.getpid()})
    assert complaint is not None and "the driver" in complaint and "Env[0]" in complaint
