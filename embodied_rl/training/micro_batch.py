"""Micro-batches, the samples that go through the network at once: a number, a number of tokens, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied_rl.errors import UserError, first_line, out_of_memory
from embodied_rl.schema import MicroBatchSize
from embodied_rl.training.sharding import is_sharded

if TYPE_CHECKING:
    from embodied_rl.training.pass_collectives import PassCollectives

T = TypeVar("T")


class MicroBatch:
    """Cuts samples into micro-batches.

    Where their lengths differ, samples of like length go together: less padding. With ``auto`` all samples are tried at
    once first. Where memory runs out, on any rank, the size is halved on all for the rest of the run, and the work is
    done again from its beginning, with the random numbers that it began with.

    Args:
        size: samples, or ``auto``.
        policies: sharded ones that the work passes through; what an interrupted pass left in them is thrown away.
        max_tokens: instead of ``size``, the tokens of a micro-batch, padding included; a longer sample goes alone.
        key: of the configuration, that gives a size by hand.
        say: told of each smaller size, by one rank.

    Raises:
        UserError: this torch cannot do that.
    """

    def __init__(
        self,
        size: MicroBatchSize,
        *policies: nn.Module,
        max_tokens: int | None = None,
        key: str = "actor.micro_batch_size",
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        self._fixed = size if size != "auto" else None
        self._max_tokens, self._key, self._say = max_tokens, key, say
        self.fitting: int | None = None
        """The number of samples found to fit; None where nothing was tried."""
        if size == "auto" and any(is_sharded(p) and not hasattr(p, "reset_iter_state") for p in policies):
            raise UserError(
                f"actor.micro_batch_size=auto: torch {torch.__version__} cannot go on after an interrupted pass; use "
                "torch 2.13, or a number"
            )
        self._exhausted: str | None = None
        """Why this rank's present work is in vain."""
        self._collectives: PassCollectives | None = None
        # FSDP has nothing to throw away, and refuses to, before its first pass.
        self._started: set[nn.Module] = set()
        if size == "auto":
            for policy in policies:
                policy.register_forward_pre_hook(lambda module, _: self._started.add(module))
            if dist.is_initialized() and dist.get_world_size() > 1:
                from embodied_rl.training.pass_collectives import PASS_COLLECTIVES  # of torch 2.13

                self._collectives = PASS_COLLECTIVES
                self._collectives.watch(policies)

    @property
    def in_vain(self) -> bool:
        """This rank ran out of memory, and goes through its passes for the others' sake alone."""
        return self._exhausted is not None

    def run(self, count: int, lengths: Tensor | None, work: Callable[[list[Tensor]], T]) -> T:
        """``work`` on ``count`` samples: it gets the indices ([k] int64) of each micro-batch, and makes each pass by
        :meth:`attempt`. With ``auto`` a collective.

        Args:
            lengths: [count,K] int64 as ``Policy.sample_lengths``.

        Raises:
            UserError: not even one sample fits.
        """
        if self._max_tokens is not None and lengths is not None:
            return work(within_budget(lengths, self._max_tokens))
        if self._fixed is not None:
            return work(of_equal_size(count, lengths, self._fixed))
        while True:
            size = max(1, min(count, self.fitting or count))
            draws = _random_state()
            found: list[T] = []
            if self._collectives is not None:
                self._reshard()
            try:
                found.append(work(of_equal_size(count, lengths, size)))
            except (RuntimeError, MemoryError) as error:
                if self._collectives is not None or not out_of_memory(error):
                    raise
                self._exhausted = first_line(error)
            # Out of the except block: the error holds the frames, and so the tensors, of the failed pass.
            why, self._exhausted = self._exhausted, None
            failed = _of_all_ranks(0 if why is None else size)
            if not any(failed):
                return found[0]
            smallest = min(size for size in failed if size)
            where = "" if len(failed) == 1 else f" on rank {', '.join(str(r) for r, size in enumerate(failed) if size)}"
            if smallest == 1:
                raise self._nothing_fits(why or f"memory ran out{where}.")
            self.fitting = smallest // 2
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._say(
                    f"out of memory{where} with {smallest} samples at once, {self.fitting} from now on; set "
                    f"{self._key}={self.fitting} to begin with that"
                )
            self._discard()
            _set_random_state(draws)

    def attempt(self, run: Callable[[Tensor], T], rows: Tensor) -> T:
        """``run`` on one micro-batch. Where memory runs out and there are other ranks, and from then on until the work
        is done again, this rank takes part in their collectives with ``run`` of nothing.

        Args:
            rows: [k] int64; where it is empty ``run`` must pass through the network with a sample that does not count.
        """
        if self._collectives is None:
            return run(rows)
        self._collectives.begin()
        if not torch.is_grad_enabled():
            self._reshard()
        if self._exhausted is None:
            try:
                return run(rows)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._exhausted = first_line(error)
            self._discard()
            self._collectives.begin_again()
        try:
            return run(rows[:0])
        except (RuntimeError, MemoryError) as error:
            raise self._nothing_fits(first_line(error)) if out_of_memory(error) else error from error

    def _nothing_fits(self, why: str) -> UserError:
        return UserError(
            f"actor.micro_batch_size=auto: not even one sample fits in memory: {why} Set "
            "actor.gradient_checkpointing=true, use a smaller model, or shorter inputs"
        )

    def _reshard(self) -> None:
        """Bring the policies to where a pass makes all its collectives.

        A pass without gradients leaves parameters gathered (``reshard_after_forward=false``) and an order to gather
        them in, of which a rank that ran out of memory has nothing left: the ranks would make different ones. A
        backward pass leaves neither; but for sums of gradients between passes, which this would throw away.
        """
        for policy in self._started:
            if is_sharded(policy):
                policy.reset_iter_state()

    def _discard(self) -> None:
        """Throw away what passes left in the policies."""
        self._reshard()
        for policy in self._started:
            policy.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _of_all_ranks(own: int) -> list[int]:
    """Each rank's number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)  # by gloo, everywhere
    numbers[dist.get_rank()] = own
    dist.all_reduce(numbers)
    return numbers.tolist()


def _random_state() -> list[Tensor]:
    """Of torch's own generators, from which dropout draws."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _set_random_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    for of_device in state[1:]:
        torch.cuda.set_rng_state(of_device)


def of_equal_size(count: int, lengths: Tensor | None, size: int) -> list[Tensor]:
    """Indices of ``count`` samples, ``size`` at a time; the longest first, where they have lengths."""
    if not count:
        return []
    order = torch.arange(count) if lengths is None else lengths.sum(1).argsort(descending=True, stable=True)
    return list(order.split(size))


def within_budget(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Indices of samples, as many at a time as have ``max_tokens`` together, padding included; the longest first.

    A part of a sample is padded to the longest such part in its micro-batch. A sample above the budget goes alone.
    """
    order = lengths.sum(1).argsort(descending=True, stable=True)
    groups: list[list[int]] = []
    longest = [0] * lengths.shape[1]
    for index, parts in zip(order.tolist(), lengths[order].tolist(), strict=True):
        padded = [max(pair) for pair in zip(longest, parts, strict=True)]
        if groups and sum(padded) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
            longest = padded
        else:
            groups.append([index])
            longest = parts
    return [torch.tensor(group) for group in groups]
