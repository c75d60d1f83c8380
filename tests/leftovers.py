"""Shared memory that a test leaves behind, beside what other processes of the machine use meanwhile."""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path

import psutil

_OURS = ("torch_", "psm_", "sem.", "embodied")
"""How the names begin that the libraries of this project give."""
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def keep_shared_memory_apart() -> bool:
    """Give the calling thread, and the processes that it starts, a /dev/shm of their own; only root may.

    Otherwise a worker that another process' test has killed looks like a leak of this one's: the semaphore stays until
    the resource tracker of that process ends, and nobody has it mapped. See mount(2) and unshare(2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    # Private first: else the mount would be every process' of the machine.
    return (
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
    )


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(_OURS)}


def left_since(before: set[str], patience: float = 2.0) -> set[str]:
    """New files that no process outside this one and its children has mapped, as another that runs tests would."""
    deadline = time.monotonic() + patience
    while True:
        found = shared_files() - before
        left = found - _mapped_elsewhere() if found else found
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _mapped_elsewhere() -> set[str]:
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    names: set[str] = set()
    for pid in set(psutil.pids()) - own:
        try:
            names.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:  # it has ended, or is another user's
            continue
    return names
