"""A stand-in accelerator, for machines without one: it computes on the CPU and refuses what a real one would refuse.

Its tensors say that they are on :data:`DEVICE` and hold their numbers in a CPU tensor. An operation on tensors of two
devices raises as it does on a GPU, and results can be compared with those of the CPU. torch's own fake tensors mix
devices as badly, but have no numbers, so that they stop at the first ``.item()`` of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from embodied_rl.models.base import Policy

DEVICE = "meta"
"""The name under which torch lets tensors without memory of their own exist."""

_aten: Any = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
"""Operations between devices."""
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
"""Their indices may be on the CPU."""


@contextmanager
def stand_in_accelerator() -> Iterator[str]:
    """Inside, :data:`DEVICE` is an accelerator; its tensors do not outlive the context."""
    with (
        _FromNumbers(),
        _Placement(),
        patch.object(torch, "Generator", _Generator),
        patch("torch.optim.adam._device_dtype_check_for_fused"),  # it knows real accelerators by name
    ):
        # A module that is moved keeps its parameters, tied ones tied.
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield DEVICE
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapped)
            _Generator.of_device.clear()


def sharded(policy: Policy) -> Policy:
    """The policy as FSDP2 would leave it on one rank, without FSDP2, which asks for a device of its own kind."""
    made = type(f"Sharded{type(policy).__name__}", (_Sharded, type(policy)), {})
    policy.__class__ = made
    return policy


class _Sharded(FSDPModule):
    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise TypeError("made from a policy, by sharded()")

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """There is nobody to share gradients with."""

    def reset_iter_state(self) -> None:
        """Nothing is gathered."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return nn.Module._apply(cast(nn.Module, self), fn, recurse)


class _OnDevice(Tensor):
    """A tensor of the stand-in accelerator."""

    numbers: Tensor
    """On the CPU."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _OnDevice:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(DEVICE),
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # not an operation, and not to be had for subclasses
            return args[0].numbers.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"on {DEVICE}: {self.numbers!r}"


class _Generator(torch.Generator):
    """One that knows which device it draws for."""

    of_device: ClassVar[dict[int, _Generator]] = {}
    """Those of the stand-in by address: an operation sees another Python object of the same generator."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls)
        if torch.device(device).type == DEVICE:
            cls.of_device[_address(made)] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE if _address(self) in self.of_device else "cpu")


def _address(generator: torch.Generator) -> int:
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]


class _FromNumbers(TorchFunctionMode):
    """Brings tensors that are made of Python's numbers to the device; torch would not even read the numbers."""

    MAKERS: ClassVar[set[Any]] = {torch.tensor, torch.as_tensor, torch.asarray}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.MAKERS and kwargs.get("device") is not None:
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


class _Placement(TorchDispatchMode):
    """Sees what is made on a device or brought to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_inference_mode_enabled():
            return _run(func, args, kwargs)
        # Out of that mode: a view made in it would be of another kind than a tensor that was not. And what is made of
        # other operations arrives whole in it.
        with torch.inference_mode(False), torch.no_grad():
            if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
                with self:
                    return func.decompose(*args, **kwargs)
            return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU, with its result where a real device would leave it."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(tensor, _OnDevice) for tensor in given)
    _refuse_mixture(func, args, given)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == DEVICE
    _refuse_generator(func, kwargs.get("generator"), on_device)
    own_args, own_kwargs = tree_map_only(_OnDevice, lambda tensor: tensor.numbers, (args, kwargs))
    if kwargs.get("device") is not None:
        own_kwargs = own_kwargs | {"device": "cpu"}
    # A device has a random state of its own.
    drawn = on_device and torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    with torch.random.fork_rng(devices=[], enabled=drawn):
        result = func(*own_args, **own_kwargs)
    if func is _aten._to_copy.default and any(result is tensor for tensor in tree_leaves(own_args)):
        result = result.clone()
    if not on_device:
        return result
    result = tree_map_only(Tensor, _OnDevice, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if given else result


def _refuse_mixture(func: Any, args: tuple[Any, ...], given: list[Tensor]) -> None:
    if len({isinstance(tensor, _OnDevice) for tensor in given}) < 2 or func in _COPIES:
        return
    strangers = [tensor for tensor in given if not isinstance(tensor, _OnDevice)]
    if func in _INDEXING and isinstance(args[0], _OnDevice):
        strangers = [t for t in strangers if not any(t is index for index in args[1])]
    if torch.Tag.pointwise in func.tags and not (func._schema.is_mutable and args[0] is strangers[0]):
        strangers = [tensor for tensor in strangers if tensor.ndim]  # a number, as far as the kernel is concerned
    if strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got "
            + ", ".join(f"{list(t.shape)} on {t.device}" for t in given)
        )


def _refuse_generator(func: Any, generator: torch.Generator | None, on_device: bool) -> None:
    if generator is not None and (_address(generator) in _Generator.of_device) != on_device:
        raise RuntimeError(f"{func}: expected a generator of the result's device, got one of another")
