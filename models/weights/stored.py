"""Policies that are built without a copy of their files, and take their own type a block at a time.

safetensors maps a file into memory. Within :func:`as_stored` a policy keeps those tensors in the file's type, so all
processes of a node share their pages and none holds the weights a second time. :func:`settle` then gives a module's
parameters and buffers the type that the policy wants of them: sharding does so block by block, and keeps its shard of
each before the next is read.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn

_WANTED: Final = "_wanted_dtype"
"""Attribute of a tensor that is still of its file's type."""
_as_stored: ContextVar[bool] = ContextVar("as_stored", default=False)


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Within, policies that can are built of the tensors of their files: whoever builds them calls :func:`settle`."""
    token = _as_stored.set(True)
    try:
        yield
    finally:
        _as_stored.reset(token)


def assign(module: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Give a module, which may be on the meta device, its whole state in ``dtype``: without a copy where that is the
    tensors' type, and in any case within :func:`as_stored`."""
    if not _as_stored.get():
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    module.load_state_dict(weights, assign=True)
    want(module.state_dict(keep_vars=True).values(), dtype)


def want(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Have :func:`settle` make the tensors ``dtype``, whatever they are now."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            setattr(tensor, _WANTED, dtype)
        elif hasattr(tensor, _WANTED):
            delattr(tensor, _WANTED)


def wanted(tensor: Tensor) -> torch.dtype:
    """The type that a tensor has after :func:`settle`."""
    return getattr(tensor, _WANTED, tensor.dtype)


def settle(module: nn.Module) -> None:
    """Give a module's parameters and buffers the type that is wanted of them, in place."""
    changing = [tensor for tensor in chain(module.parameters(), module.buffers()) if hasattr(tensor, _WANTED)]
    if changing:
        # What an earlier module's were copied to before they were sharded lies between its shards, in pieces.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
    for tensor in changing:
        tensor.data = tensor.data.to(wanted(tensor))
        delattr(tensor, _WANTED)
