"""Processes that workers start: each worker leads a process group, which they are in."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


def members(leaders: Collection[int]) -> dict[int, list[int]]:
    """Leader of a process group -> its processes, itself first, even before it has made the group.

    A process in a session of its own is in no such group.
    """
    found = {leader: [leader] for leader in leaders}
    for entry in os.listdir("/proc") if leaders else ():
        if entry.isdigit() and (pid := int(entry)) not in found:
            with suppress(OSError):  # it has ended since
                if (group := os.getpgid(pid)) in found:
                    found[group].append(pid)
    return found
