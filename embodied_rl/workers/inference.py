"""A policy's decisions in micro-batches, which change none of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError, first_line, out_of_memory
from embodied_rl.models.base import Policy, PolicyOutput

T = TypeVar("T")
_FACTORIES: Final[dict[Any, int]] = {torch.rand: 0, torch.randn: 0, torch.randint: 1}
"""Functions that draw a new tensor -> positional arguments before its shape, at least."""
_IN_PLACE: Final = (Tensor.exponential_, Tensor.normal_, Tensor.uniform_)


class MicroBatches:
    """Infers for at most so many observations at once. Where memory runs out half as many are tried, from then on.

    Args:
        size: None: all.
    """

    def __init__(self, size: int | None, say: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
        self.size, self._say = size, say

    def act(self, policy: Policy, obs: EnvObs, *, greedy: bool, temperature: float, seed: int) -> PolicyOutput:
        """As :meth:`Policy.act` for all at once; results are on the CPU."""

        def part(rows: slice) -> PolicyOutput:
            generator = torch.Generator(obs.state.device).manual_seed(seed)
            if rows == slice(0, len(obs)):  # nothing to cut: watching all calls takes longer than a small policy does
                found = policy.act(obs, greedy=greedy, temperature=temperature, generator=generator)
            else:
                with _RowsOf(rows, len(obs), generator):
                    found = policy.act(obs.rows(rows), greedy=greedy, temperature=temperature, generator=generator)
            return found.changed(Tensor.cpu)

        return PolicyOutput.concatenate(self._run(policy, len(obs), part))

    def values(self, policy: Policy, obs: EnvObs) -> Tensor:
        """As :meth:`Policy.values`, on the CPU."""
        return torch.cat(self._run(policy, len(obs), lambda rows: policy.values(obs.rows(rows)).cpu()))

    def _run(self, policy: Policy, count: int, work: Callable[[slice], T]) -> list[T]:
        """``work`` on each part of ``count`` rows.

        Raises:
            UserError: memory does not do for one.
        """
        while True:
            size = min(count, self.size or count)
            try:
                return [work(slice(start, min(start + size, count))) for start in range(0, count, size)]
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise UserError(
                        f"rollout.micro_batch_size: not even one observation fits in memory: {first_line(error)} Use a "
                        "smaller model, or rollout.dtype=bfloat16"
                    ) from error
            # Out of the except block: the error holds the frames, and so the tensors, of the failed pass.
            self.size = max(1, size // 2)
            self._say(
                f"rollout: out of memory with {size} observations at once, {self.size} from now on; set "
                f"rollout.micro_batch_size={self.size} to begin with that"
            )
            policy.free_buffers()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def uniform(policy: Policy, obs: EnvObs, *, seed: int) -> PolicyOutput:
    """Decisions at random, uniform in [-1, 1], in the policy's place; all on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(obs), policy.spec.num_action_chunks, policy.spec.action_dim)
    decided = 2.0 * torch.rand((len(obs), *policy.decision_shape), generator=generator) - 1.0
    actions = policy.executed(policy.demonstration(obs, torch.zeros(shape)), decided)
    return PolicyOutput(
        actions=actions,
        logprobs=torch.full(shape, -math.log(2.0)),
        values=None,
        replay_inputs=policy.demonstration(obs, actions),
    ).changed(Tensor.cpu)


class _RowsOf(TorchFunctionMode):
    """Draws of a part are the part's rows of what all rows together would draw: each tensor that is drawn with
    ``generator`` has a row for each observation, so it is drawn for all of them, and the others' are left out."""

    def __init__(self, rows: slice, count: int, generator: torch.Generator) -> None:
        super().__init__()
        self._rows, self._count, self._generator = rows, count, generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not self._generator:
            return func(*args, **kwargs)
        if func in _IN_PLACE:
            tensor, *rest = args
            whole = tensor.new_empty(self._all(tensor.shape))
            return tensor.copy_(func(whole, *rest, **kwargs)[self._rows])
        if func not in _FACTORIES:
            raise RuntimeError(
                f"rollout.micro_batch_size: the policy draws by {getattr(func, '__name__', func)}, expected "
                "torch.rand, randn, randint, or a tensor's exponential_, normal_ or uniform_; set it to null"
            )
        if "size" in kwargs:
            return func(*args, **{**kwargs, "size": self._all(kwargs["size"])})[self._rows]
        # A shape is a sequence, or the numbers at the end; randint's bounds stand before it.
        *bounds, last = args
        if isinstance(last, int):
            bounds, last = list(args[: _FACTORIES[func]]), args[_FACTORIES[func] :]
        return func(*bounds, self._all(last), **kwargs)[self._rows]

    def _all(self, shape: Any) -> tuple[int, ...]:
        own = self._rows.stop - self._rows.start
        if not len(shape) or shape[0] != own:
            raise RuntimeError(
                f"rollout.micro_batch_size: the policy draws numbers of shape {list(shape)}, expected {own} rows, one "
                "for each observation; set it to null"
            )
        return (self._count, *shape[1:])
