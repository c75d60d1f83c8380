"""A policy whose weights are held in fewer bits than those that are trained, to act with or to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_rl.models.base import Policy
from embodied_rl.models.weights.stored import settle, want, wanted


def hold_in(policy: Policy, dtype: torch.dtype) -> None:
    """Round a policy's float32 parameters, in place, and have it compute as FSDP2's mixed precision would.

    Inputs of ``shard_units`` are cast; what lies outside of them stays as it is in a policy with ``float32_root``. So
    do buffers.
    """
    want_in(policy, dtype)
    settle(policy)


def want_in(policy: Policy, dtype: torch.dtype) -> None:
    """As :func:`hold_in`, for weights that are rounded when they are sharded."""
    units = policy.shard_units()
    inside = {parameter for unit in units for parameter in unit.parameters()}
    for parameter in policy.parameters():
        if wanted(parameter) == torch.float32 and (parameter in inside or not policy.float32_root):
            want([parameter], dtype)
    for unit in units:
        unit.register_forward_pre_hook(lambda _, args, kwargs: _cast(args, kwargs, dtype), with_kwargs=True)


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
