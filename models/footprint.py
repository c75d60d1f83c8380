"""Memory that a policy's passes take, found with tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Policy
from embodied_rl.models.flops import granted


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a policy, and of one sample that goes through it."""

    weights: int
    trained: int
    """Of the weights those that have a gradient."""
    saved: int
    """What a forward pass keeps of a sample for the backward pass."""
    widest: int
    """What the operation with most has in and out, of a sample, in acting or in evaluating: all that a pass without
    gradient needs at once."""
    recorded: int
    """What is recorded of a sample to compute its probability again."""


def footprint(policy: Policy, lengths: tuple[int, ...] | None = None) -> Footprint:
    """Measure a policy that is on the meta device.

    Args:
        lengths: of the parts of its longest sample, where it has any.
    """
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []
    """Or another storage would get the place of one that is gone."""

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with granted(), _Widest(own) as mode:
        inputs = _example(policy) if lengths is None else policy.sample_of(lengths)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.evaluate(inputs, temperature=1.0)
    return Footprint(
        weights=sum(_bytes(parameter) for parameter in policy.parameters()),
        trained=sum(_bytes(parameter) for parameter in policy.parameters() if parameter.requires_grad),
        saved=sum(saved.values()),
        widest=mode.bytes,
        recorded=sum(_bytes(tensor) for tensor in inputs.values()),
    )


def _example(policy: Policy) -> Mapping[str, Tensor]:
    """``replay_inputs`` of one sample of what the policy was made for."""
    spec = policy.spec
    obs = EnvObs(
        env_ids=torch.zeros(1, dtype=torch.int64),
        images={camera: torch.zeros(1, *size, 3, dtype=torch.uint8) for camera, size in spec.image_shapes.items()},
        state=torch.zeros(1, spec.state_dim),
        instructions=("do what is to be done",),
    )
    return policy.act(obs, greedy=True, temperature=1.0, generator=None).replay_inputs


class _Widest(TorchDispatchMode):
    """Looks at what each operation has in and out, but for weights."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights, self.bytes = weights, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, found)) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self.bytes = max(self.bytes, sum(size for key, size in storages.items() if key not in self._weights))
        return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
