"""Weights that wait in host memory while another component uses the accelerator (``enable_offload``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError


def require_accelerator(key: str, device: str) -> None:
    """Raises UserError: there is nothing to offload from."""
    if device == "cpu":
        raise UserError(
            f"{key}=true: this worker has no accelerator, so all is in host memory already; set it to false"
        )


class HostWeights:
    """A policy without gradients whose weights live in host memory, and on a device while it is used.

    New versions are written to the host's copy, so nothing is copied back when the device's is dropped.

    Args:
        policy: on the CPU; it keeps the tensors that it has now as its host copy.
    """

    def __init__(self, policy: nn.Module, device: str) -> None:
        self._device = device
        self._host: list[tuple[Tensor, Tensor]] = []
        for tensor in (*policy.parameters(), *policy.buffers()):
            if device != "cpu":
                tensor.data = tensor.data.pin_memory()
            self._host.append((tensor, tensor.data))

    def load(self) -> None:
        """Copy the weights to the device."""
        for tensor, host in self._host:
            tensor.data = host.to(self._device, non_blocking=True, copy=True)

    def drop(self) -> None:
        """Free the device's copy."""
        for tensor, host in self._host:
            tensor.data = host
        release_memory(self._device)


def release_memory(device: str) -> None:
    """Give freed memory back, so that other processes on the device can have it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
