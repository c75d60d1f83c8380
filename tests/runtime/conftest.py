"""A process backend that must leave nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

from embodied_rl.runtime import process
from embodied_rl.runtime.process import ProcessBackend
from tests.leftovers import left_since, shared_files

MakeBackend = Callable[..., ProcessBackend]


def alive(pid: int, patience: float = 0.0) -> bool:
    """Whether the process still runs after ``patience`` seconds. A zombie does not."""
    deadline = time.monotonic() + patience
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.02)


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def make_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeBackend]:
    """Makes backends; at the end they are shut down, and must have left no process and no file."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    resource_tracker.ensure_running()  # multiprocessing's own process; it goes with pytest
    children, files = descendants(), shared_files()
    backends: list[ProcessBackend] = []

    def make(stall_timeout: float = 100.0) -> ProcessBackend:
        backends.append(ProcessBackend(stall_timeout))
        assert len(list(scratch.iterdir())) == len(backends)
        return backends[-1]

    yield make
    for backend in backends:
        backend.shutdown()
    assert not descendants() - children
    assert not left_since(files)
    assert not list(scratch.iterdir())


@pytest.fixture
def backend(make_backend: MakeBackend) -> ProcessBackend:
    return make_backend()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose workers end up asleep, so that each of them does not take the whole grace period."""
    monkeypatch.setattr(process, "_GRACE_S", 0.5)
