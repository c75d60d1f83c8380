"""How a worker shows that it is at work, at next to no cost: progress that it reports, and data that it moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from embodied_rl.runtime.worker import ProgressCallback

_REPORT_S: Final = 0.1
"""Reports that follow faster say nothing new to whoever watches."""
_LOOK_S: Final = 1.0
_MOVED_BYTES: Final = 2**20
"""Far more in :data:`_LOOK_S` than waiting takes, far less than any disk or network gives."""


def rarely(report: ProgressCallback, clock: Callable[[], float] = time.monotonic) -> ProgressCallback:
    """Drop reports that follow another within a tenth of a second, so that each micro-batch can make one.

    What is done is never dropped, nor is the first report of what follows it.
    """
    last = -float("inf")

    def at_most_often(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if done >= total or now - last >= _REPORT_S:
            last = now if done < total else -float("inf")
            report(what, done, total)

    return at_most_often


class DataWatch:
    """Gives a sign of life while this process reads or writes, as it does in one long call to load or save weights.

    Args:
        sign: called from a thread; an error of its ends the watch.
        moved: bytes that the process has read and written so far.
    """

    def __init__(self, sign: Callable[[], None], moved: Callable[[], int] | None = None) -> None:
        self._sign, self._moved = sign, moved or bytes_moved
        self._last = 0

    def start(self) -> None:
        """Look every second until the process ends."""
        threading.Thread(target=self._run, name="signs of life", daemon=True).start()

    def look(self) -> None:
        """Give the sign if much was moved since the last look."""
        moved = self._moved()
        if moved - self._last >= _MOVED_BYTES:
            self._sign()
        self._last = moved

    def _run(self) -> None:
        try:
            self._last = self._moved()
            while True:
                time.sleep(_LOOK_S)
                self.look()
        except BaseException:  # nobody listens any more, or this system does not count: the calls' reports are left
            return


def bytes_moved() -> int:
    """Bytes that this process has read and written, by system calls and by mapped files.

    Raises:
        OSError: the system does not count them.
    """
    with open("/proc/self/io", encoding="ascii") as counters:
        fields = dict(line.split(": ") for line in counters)
    return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes"))
