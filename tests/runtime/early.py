"""A worker's module that looks around when it is imported, as torch and MuJoCo do."""

from __future__ import annotations

import os
import sys

from embodied_rl.runtime.worker import Worker

FOUND = (os.environ.get("MUJOCO_GL"), os.environ.get("MALLOC_ARENA_MAX"), sorted(os.sched_getaffinity(0)))
TORCH = "torch" in sys.modules


class Early(Worker):
    def found(self) -> tuple[tuple[str | None, str | None, list[int]], bool]:
        """What the import found, and whether torch had been imported before."""
        return FOUND, TORCH

    def cores(self) -> list[int]:
        """Those of the worker now."""
        return sorted(os.sched_getaffinity(0))

    def first_environment(self, name: str) -> bool:
        """Whether the process had the variable from its first instruction."""
        with open("/proc/self/environ", "rb") as file:
            return any(entry.startswith(f"{name}=".encode()) for entry in file.read().split(b"\0"))
