"""``torch.compile`` for acting: the function that a policy calls at every denoising step or token, or its blocks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._pytree import tree_map_only

from embodied_rl.errors import UserError, first_line
from embodied_rl.models.base import Policy

F = TypeVar("F", bound=Callable[..., Any])
_SIZES: Final = 1 << 16
"""More than there are numbers of observations."""


def compile_acting(policy: Policy, device: str, *, cuda_graphs: bool) -> None:
    """Compile in place; the first decisions then take seconds to minutes. The policy must not be copied afterwards.

    Args:
        cuda_graphs: record what is compiled as CUDA graphs, which launch all kernels of a call at once.

    Raises:
        UserError: there is no compiler, or no CUDA device for graphs.
    """
    if cuda_graphs and not device.startswith("cuda"):
        raise UserError(
            f"rollout.cuda_graphs=true: this rollout worker is on {device}, and only CUDA has such graphs; set it to "
            "false (rollout.torch_compile works here, too)"
        )
    require_compiler("rollout.torch_compile", device)
    from torch._dynamo import config  # imports the compiler, too

    # As many observations are decided on at once as lanes wait, in any number; after its limits of compilations torch
    # would go on without compiling, and say so in a log alone.
    config.recompile_limit = max(config.recompile_limit, _SIZES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _SIZES)

    def compiled(function: F) -> F:
        # Each shape is recorded on its own, so a shape is not to become a variable.
        options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False} if cuda_graphs else {}
        call = torch.compile(function, **options)
        return _outside_of_modes(_copied(call) if cuda_graphs else call)

    policy.compile_acting(compiled, cuda_graphs=cuda_graphs)


def require_compiler(key: str, device: str) -> None:
    """Raise UserError where torch.compile could not make code for the device."""
    if device.startswith("cuda"):  # a C compiler is enough, and Triton says itself where there is none
        if importlib.util.find_spec("triton") is None:
            raise UserError(
                f"{key}=true: torch.compile needs Triton for {device}, which is not installed; set it to false"
            )
        return
    from torch._inductor import cpp_builder, exc  # imports the compiler: 70 MB

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise UserError(
            f"{key}=true: torch.compile needs a C++ compiler and finds none ({first_line(error)}); install g++ or set "
            "CXX to one, or set the key to false"
        ) from None


def _copied(function: Any) -> Any:
    """``function`` with copies of its results: a graph's next call overwrites what this one gave."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, function(*args, **kwargs))

    return call


def _outside_of_modes(function: Any) -> Any:
    """Without the modes by which micro-batches follow a policy's draws: there are none within, and the compiler would
    compile once more for each mode."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            while torch._C._len_torch_function_stack():
                stack.enter_context(_pop_mode_temporarily())
            return function(*args, **kwargs)

    return call
