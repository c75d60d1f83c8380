"""``status.json``: where a run stands, written beside it every few seconds for whoever watches from another shell."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from embodied_rl.files import write_json
from embodied_rl.monitoring.progress import Progress
from embodied_rl.runtime.memory import GIB, Held, held, held_by_workers

STATUS_FILE: Final = "status.json"
_EVERY_S: Final = 2.0


class StatusWriter:
    """Writes the file as long as the block lasts, from a thread of its own: also while the run waits.

    What cannot be written (a full disk) is left out: a status fails no run.

    Args:
        pids: see :meth:`~embodied_rl.runtime.worker.Backend.pids`.
    """

    def __init__(self, run_dir: Path, progress: Progress, pids: Callable[[], Mapping[str, int]]) -> None:
        self._path, self._progress, self._pids = run_dir / STATUS_FILE, progress, pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> StatusWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the latter where the run changes what is being read
            write_json(self._path, content(self._progress, self._pids()))


def content(progress: Progress, pids: Mapping[str, int]) -> dict[str, Any]:
    """What the file holds: times in seconds, memory in GiB."""
    memory = held_by_workers(pids.values())
    return {
        "time": time.time(),
        "host": platform.node(),
        "step": progress.step,
        "total_steps": progress.total,
        "doing": progress.current,
        "elapsed": progress.elapsed,
        "left": progress.eta,
        "step_seconds": progress.step_seconds,
        "restarts": progress.restarts,
        "recoveries": progress.recoveries,
        "driver_memory": _gib(held(os.getpid())),
        "workers": {
            name: {
                "doing": worker.what,
                "done": worker.done,
                "total": worker.total,
                "pid": pids.get(name),
                "memory": _gib(memory[pids[name]]) if name in pids else None,
            }
            for name, worker in progress.workers.items()
        },
    }


def _gib(memory: Held) -> float:
    return round(memory.resident / GIB, 2)
