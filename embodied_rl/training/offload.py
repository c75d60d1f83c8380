"""Sharing an accelerator over time: weights wait in host memory while another component works (``enable_offload``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embodied_rl.errors import UserError
from embodied_rl.monitoring.timers import PhaseTimer


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
        _release(self._device)


class TrainingState:
    """Sharded policies and an optimiser that are on a device while they train, and else in host memory.

    Args:
        policies: the one that is trained, and those beside it.
    """

    def __init__(self, policies: Sequence[nn.Module], optimizer: Optimizer, device: str) -> None:
        self._policies, self._optimizer, self._device = policies, optimizer, device

    @contextlib.contextmanager
    def on_device(self, timer: PhaseTimer) -> Iterator[None]:
        """Training may go on inside. Phases ``load`` and ``offload`` of ``timer`` say what the moves take."""
        with timer.phase("load"):
            self.move(self._device)
        try:
            yield
        finally:
            with timer.phase("offload"):
                self.move("cpu")

    def move(self, device: str) -> None:
        for policy in self._policies:
            policy.to(device)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for name, value in state.items():
                    # Only a fused optimiser has the number of its steps on the device.
                    if isinstance(value, Tensor) and (value.ndim or group.get("fused")):
                        state[name] = value.to(device)
        _release(self._device)


def _release(device: str) -> None:
    """Give freed memory back, so that other processes on the device can have it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
