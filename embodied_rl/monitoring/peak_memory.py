"""Most memory that a worker's process held in a phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from embodied_rl.runtime.memory import GIB

_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
"""What Linux takes as: forget the largest resident size so far (proc_pid_clear_refs(5))."""
_STATUS: Final = Path("/proc/self/status")


class Peak(NamedTuple):
    """Bytes."""

    host: int | None
    """Resident in memory, shared pages included; None where the system does not say."""
    device: int | None = None
    """Of tensors on the accelerator; None without one."""


UNKNOWN: Final = Peak(None)


class PeakMemory:
    """Of this process, between :meth:`begin` and :meth:`end`.

    Args:
        device: torch device of the worker.
    """

    def __init__(self, device: str) -> None:
        self._device = device if torch.device(device).type == "cuda" else None
        self._begun = False

    def begin(self) -> None:
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._begun = True
        except OSError:
            self._begun = False
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> Peak:
        device = None if self._device is None else torch.cuda.max_memory_allocated(self._device)
        return Peak(_high_water() if self._begun else None, device)


def _high_water() -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return None


def memory_metrics(name: str, peaks: Sequence[Peak]) -> dict[str, float]:
    """``memory/`` metrics of a group of workers: GiB of the one that held most; what one does not know is left out."""
    hosts, devices = [peak.host for peak in peaks], [peak.device for peak in peaks]
    known = {f"memory/{name}_gb": hosts, f"memory/{name}_device_gb": devices}
    return {
        metric: max(size for size in sizes if size is not None) / GIB
        for metric, sizes in known.items()
        if sizes and None not in sizes
    }
