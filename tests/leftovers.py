"""Shared memory that a test leaves behind, beside what other processes of the machine use meanwhile."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil

_OURS = ("torch_", "psm_", "sem.", "embodied")
"""How the names begin that the libraries of this project give."""


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
