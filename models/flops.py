"""Floating-point operations of a policy's passes, counted by torch, for all but small ones on tensors without memory.

What counts is matrix products, convolutions and attention, 2·m·n·k each (``torch.utils.flop_counter``); of attention
all pairs of tokens, masked or not (PaLM, arXiv:2204.02311, appendix B). The backward pass is counted as autograd walks
it: twice the forward pass where all weights are trained, about once where a frozen base has adapters.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations_with_replacement
from types import ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbolic
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import first_line
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.stored import wanted
from embodied_rl.monitoring.work import Flops

T = TypeVar("T")
_SMALL: Final = 4_000_000
"""Parameters."""
_DEGREE: Final = 2
"""Attention is quadratic in the number of tokens, all else linear or constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingCost:
    """Operations of an observation."""

    act: float
    values: float
    """Of a state on which nobody acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """Operations of a recorded sample: coefficients of the monomials (:func:`_monomials`) of the lengths of its parts
    (``Policy.sample_lengths``), a constant alone where it has none."""

    forward: tuple[float, ...]
    training: tuple[float, ...]
    """Forward and backward pass."""
    again: tuple[float, ...]
    """What checkpointing adds to those."""

    def inferred(self, count: int, lengths: Tensor | None) -> Flops:
        """Forward passes of ``count`` samples; ``lengths`` as ``Policy.sample_lengths``."""
        return Flops(model=_total(self.forward, count, lengths))

    def trained(self, count: int, lengths: Tensor | None) -> Flops:
        """Forward and backward passes of ``count`` samples."""
        return Flops(model=_total(self.training, count, lengths), again=_total(self.again, count, lengths))


def countable(policy: Policy) -> Policy:
    """A copy to count on, its parameters of the type that they are to have: without memory, on the meta device, or a
    small one's on the CPU, since what torch calculates of shapes alone imports sympy, 0.3 s. Not of a policy
    that is sharded."""
    parameters = list(policy.parameters())
    small = sum(p.numel() for p in parameters) <= _SMALL and not any(p.is_meta for p in parameters)
    # On the CPU their masks decide how much is computed.
    small &= not any(type(module).__module__.startswith("transformers.") for module in policy.modules())
    device, known = "cpu" if small else "meta", dict[int, object]()
    for parameter in parameters:
        held = torch.zeros_like(parameter, device=device, dtype=wanted(parameter))
        known[id(parameter)] = torch.nn.Parameter(held, requires_grad=parameter.requires_grad)
    for buffer in policy.buffers():
        known[id(buffer)] = torch.zeros_like(buffer, device=device)
    return copy.deepcopy(policy, known)


def acting_cost(policy: Policy, obs: EnvObs) -> ActingCost:
    """What acting on an observation like ``obs`` takes.

    Args:
        policy: of :func:`countable`.
        obs: of one env, on the CPU.
    """
    return ActingCost(
        act=_counted(lambda: policy.act(obs, greedy=True, temperature=1.0, generator=None)),
        values=_counted(lambda: policy.values(obs)) if policy.spec.values_per_chunk else 0.0,
    )


def sample_cost(
    policy: Policy, inputs: Mapping[str, Tensor], recompute: Callable[[Policy], None] | None = None
) -> SampleCost:
    """What passes of samples like that of ``inputs`` take.

    Args:
        policy: of :func:`countable`.
        inputs: ``replay_inputs`` of one sample, on the CPU.
        recompute: puts gradient checkpointing into a policy.
    """
    lengths = policy.sample_lengths(inputs)
    if lengths is None:
        samples, monomials = [inputs], torch.ones(1, 1, dtype=torch.float64)
    else:
        # As many points as there are monomials, which they determine: those of a simplex.
        parts = lengths.shape[1]
        chosen = list(combinations_with_replacement(range(parts + 1), _DEGREE))
        points = torch.tensor([[1 + point.count(part) for part in range(parts)] for point in chosen])
        samples = [policy.sample_of(tuple(point)) for point in points.tolist()]
        monomials = _monomials(points)
    bare = torch.tensor([_passes(policy, sample) for sample in samples], dtype=torch.float64)
    whole = bare[:, 1]
    if recompute is not None:
        again = countable(policy)
        recompute(again)
        whole = torch.tensor([_passes(again, sample)[1] for sample in samples], dtype=torch.float64)
    forward, training, more = torch.linalg.solve(monomials, torch.stack([*bare.unbind(1), whole - bare[:, 1]], 1)).T
    return SampleCost(forward=tuple(forward.tolist()), training=tuple(training.tolist()), again=tuple(more.tolist()))


def if_countable(count: Callable[[], T]) -> T | None:
    """What ``count`` gives; None, with a word on why, where a policy from outside needs more than shapes."""
    try:
        return count()
    except Exception as error:  # whatever a policy does
        print(f"perf/ metrics are left out, the policy's operations cannot be counted: {first_line(error)}", flush=True)
        return None


def _passes(policy: Policy, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """Of a forward pass, and of that and the backward pass after it."""

    def train() -> None:
        found = policy.evaluate(inputs, temperature=1.0)
        outputs = [found.logprobs, found.entropy, *([] if found.values is None else [found.values])]
        torch.stack([output.sum() for output in outputs if output.requires_grad]).sum().backward()

    with torch.no_grad():
        forward = _counted(lambda: policy.evaluate(inputs, temperature=1.0))
    return forward, _counted(train)


def _counted(work: Callable[[], object]) -> int:
    # A copy with memory draws numbers; those of the run stay as they are.
    with torch.random.fork_rng(devices=[]), granted(), _uncompiled(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


_COMPILER: Final = "torch._dynamo"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Within, torch does not import its compiler only to keep it away from operations on tensors without memory, which
    takes a second and 70 MB: none of those is compiled. A process that has it keeps it."""
    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = stand_in = _NoCompiler(_COMPILER)
    try:
        yield
    finally:
        for fn in stand_in.left_alone:  # torch keeps the answer with the function; a later compilation must ask anew
            getattr(fn, "__dict__", {}).pop("__dynamo_disable", None)
        if isinstance(sys.modules.get(_COMPILER), _NoCompiler):
            del sys.modules[_COMPILER]


class _NoCompiler(ModuleType):
    """Leaves every function as it is. Whatever else is asked of it, modules below it included, the compiler itself
    answers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left_alone: list[Any] = []

    def disable(self, fn: T, recursive: bool = True, **options: Any) -> T:
        del recursive, options
        self.left_alone.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import system's own questions
            raise AttributeError(name)
        sys.modules.pop(_COMPILER, None)
        return getattr(importlib.import_module(_COMPILER), name)


@contextmanager
def granted() -> Iterator[None]:
    """Within, what a model asks of numbers that are not there holds: its masks leave nothing out, and they are 0."""
    all_counts: Any = symbolic.patch(meta_nonzero_assume_all_nonzero=True)  # pyright: ignore[reportAttributeAccessIssue]
    with all_counts, _Granted():
        yield


class _Granted(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is Tensor.tolist and args[0].is_meta:  # a state that is written into a prompt
            return torch.zeros_like(args[0], device="cpu").tolist()
        return func(*args, **(kwargs or {}))


def _monomials(lengths: Tensor) -> Tensor:
    """[N,K] -> [N,M] float64: 1, the lengths, and the products of two of them."""
    padded = torch.cat([torch.ones(len(lengths), 1), lengths], 1).double()
    chosen = combinations_with_replacement(range(padded.shape[1]), _DEGREE)
    return torch.stack([padded[:, list(columns)].prod(1) for columns in chosen], 1)


def _total(coefficients: tuple[float, ...], count: int, lengths: Tensor | None) -> float:
    if lengths is None:
        return count * coefficients[0]
    return float((_monomials(lengths.cpu()) @ torch.tensor(coefficients, dtype=torch.float64)).sum())
