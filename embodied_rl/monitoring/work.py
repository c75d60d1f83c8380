"""Work that workers do in a phase, against what their devices can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

TERA: Final = 1e12
_16_BITS: Final = (torch.bfloat16, torch.float16)
PEAKS: Final[Mapping[str, tuple[float, float]]] = {
    "NVIDIA A100-PCIE-40GB": (312.0, 19.5),
    "NVIDIA A100-SXM4-40GB": (312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA H100 80GB HBM3": (989.5, 67.0),
    "NVIDIA H100 PCIe": (756.5, 51.0),
    "NVIDIA H200": (989.5, 67.0),
}
"""Device, as CUDA names it -> dense TFLOP/s in bfloat16 or float16, and in float32 outside of tensor cores, by NVIDIA's
datasheets, which for H100 and H200 give twice as much, "with sparsity", in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations of some passes of a policy."""

    model: float = 0.0
    """What the mathematics asks for."""
    again: float = 0.0
    """What gradient checkpointing computes a second time."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(model=self.model + other.model, again=self.again + other.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one worker did in a phase of a training step."""

    flops: Flops
    peak: float | None
    """FLOP/s of its device in the type that it computes in; None: nobody knows."""


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of a torch device by its vendor; None for processors, and devices that are not in :data:`PEAKS`."""
    if torch.device(device).type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(device))
    if peaks is None:
        return None
    if dtype in _16_BITS:
        return TERA * peaks[0]
    # TensorFloat-32 has another peak.
    return TERA * peaks[1] if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else None


def main_type(tensors: Iterable[Tensor]) -> torch.dtype:
    """The floating-point type of most of their numbers."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def perf_metrics(phase: str, work: Sequence[Work | None], seconds: float) -> dict[str, float]:
    """``perf/`` metrics of a phase that took ``seconds``: TFLOP/s of all its workers together, their share of the
    devices' peaks (MFU, arXiv:2204.02311), and with gradient checkpointing the share that counts twice what was
    computed twice (HFU). What is not known of every worker is left out."""
    known = [part for part in work if part is not None]
    if not known or len(known) < len(work) or seconds <= 0:
        return {}
    total = sum((part.flops for part in known), Flops())
    metrics = {f"perf/{phase}_tflops": total.model / seconds / TERA}
    peaks = [part.peak for part in known if part.peak is not None]
    if len(peaks) == len(known):
        possible = seconds * sum(peaks)
        metrics[f"perf/{phase}_mfu"] = total.model / possible
        if total.again:
            metrics[f"perf/{phase}_hfu"] = (total.model + total.again) / possible
    return metrics
