"""``status.json``: where a run stands, written beside it every few seconds for whoever watches from another shell."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from pathlib import Path
from typing import Any, Final

import psutil

from embodied_rl.files import write_json
from embodied_rl.monitoring.progress import Progress

STATUS_FILE: Final = "status.json"
_EVERY_S: Final = 2.0


class StatusWriter:
    """Writes the file as long as the block lasts, from a thread of its own: also while the run waits.

    What cannot be written (a full disk) is left out: a status fails no run.
    """

    def __init__(self, run_dir: Path, progress: Progress) -> None:
        self._path, self._progress = run_dir / STATUS_FILE, progress
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
            write_json(self._path, content(self._progress))


def content(progress: Progress) -> dict[str, Any]:
    """What the file holds: times in seconds, memory in GiB."""
    memory = _memory()
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
        "driver_memory": round(psutil.Process().memory_info().rss / 2**30, 2),
        "workers": {
            name: {
                "doing": worker.what,
                "done": worker.done,
                "total": worker.total,
                "pid": memory.get(name, (None, None))[0],
                "memory": memory.get(name, (None, None))[1],
            }
            for name, worker in progress.workers.items()
        },
    }


def _memory() -> dict[str, tuple[int, float]]:
    """Worker -> process id and resident memory; Linux keeps 15 characters of a process's name."""
    found: dict[str, tuple[int, float]] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found[child.name()] = (child.pid, round(child.memory_info().rss / 2**30, 2))
    return found
