"""The largest memory of a phase, in processes that hold known amounts."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from embodied_rl.monitoring import peak_memory
from embodied_rl.monitoring.peak_memory import Peak, PeakMemory, memory_metrics

MIB = 2**20


def peak_of(size: int) -> int:
    """What the system says of a phase that held so many bytes for a moment."""
    memory = PeakMemory("cpu")
    memory.begin()
    # Not of the heap, which may have kept as much memory from what ran before.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        for page in range(0, size, mmap.PAGESIZE):
            kept[page] = 1
    found = memory.end()
    assert found.device is None
    assert found.host is not None
    return found.host


def test_a_phase_does_not_remember_the_one_before() -> None:
    little, much, little_again = (peak_of(size * MIB) for size in (1, 256, 1))
    assert much - little == pytest.approx(255 * MIB, rel=0.1)
    assert abs(little_again - little) < 25 * MIB


def test_where_the_system_does_not_forget_there_is_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    memory = PeakMemory("cpu")
    memory.begin()
    assert memory.end() == Peak(None)


def test_an_accelerator_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(("reset", device)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(("read", device)) or 3)
    memory = PeakMemory("cuda:1")
    memory.begin()
    assert memory.end().device == 3
    assert asked == [("reset", "cuda:1"), ("read", "cuda:1")]


def test_the_largest_worker_counts() -> None:
    gib = 2**30
    assert memory_metrics("env", [Peak(gib), Peak(3 * gib)]) == {"memory/env_gb": 3.0}
    assert memory_metrics("update", [Peak(gib, 2 * gib), Peak(gib, gib)]) == {
        "memory/update_gb": 1.0,
        "memory/update_device_gb": 2.0,
    }
    assert memory_metrics("update", [Peak(gib, 5), Peak(None, gib)]) == {"memory/update_device_gb": 1.0}
    assert memory_metrics("update", []) == {}
