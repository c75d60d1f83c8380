"""Env workers that share a process: with ``cluster=serial`` all of a run.

An adapter that keeps something for a process, such as a simulator's scenes, keeps as much for each of them.
"""

from __future__ import annotations

_workers = 1


def workers() -> int:
    """Number of env workers in this process."""
    return _workers


def share(count: int) -> None:
    """This process has so many env workers; before any of their simulators plays."""
    global _workers
    _workers = count
