"""Micro-batches, the samples that go through the network at once: a number, a number of tokens, or what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from embodied_rl.errors import UserError, first_line
from embodied_rl.schema import MicroBatchSize

T = TypeVar("T")


class MicroBatch:
    """Cuts samples into micro-batches.

    Where their lengths differ, samples of like length go together: less padding. With ``auto`` all samples are tried at
    once first. Where memory runs out the size is halved for the rest of the run, and the work is done again from its
    beginning. That needs a single rank: others would wait for the one that failed.

    Args:
        size: samples, or ``auto``.
        policies: sharded ones that the work passes through; what an interrupted pass left in them is thrown away.
        max_tokens: instead of ``size``, the tokens of a micro-batch, padding included; a longer sample goes alone.

    Raises:
        UserError: this torch cannot do that.
    """

    def __init__(self, size: MicroBatchSize, *policies: nn.Module, max_tokens: int | None = None) -> None:
        self._fixed = size if size != "auto" else None
        self._max_tokens = max_tokens
        self.fitting: int | None = None
        """The number of samples found to fit; None where nothing was tried."""
        if size == "auto" and not hasattr(FSDPModule, "reset_iter_state"):
            raise UserError(
                f"actor.micro_batch_size=auto: torch {torch.__version__} cannot go on after an interrupted pass; use "
                "torch 2.13, or a number"
            )
        # FSDP has nothing to throw away, and refuses to, before its first pass.
        self._started: set[nn.Module] = set()
        if size == "auto":
            for policy in policies:
                policy.register_forward_pre_hook(lambda module, _: self._started.add(module))

    def run(self, count: int, lengths: Tensor | None, work: Callable[[list[Tensor]], T]) -> T:
        """``work`` on ``count`` samples: it gets the indices ([k] int64) of each micro-batch.

        Args:
            lengths: [count,K] int64 as ``Policy.sample_lengths``.

        Raises:
            UserError: not even one sample fits.
        """
        if self._max_tokens is not None and lengths is not None:
            return work(within_budget(lengths, self._max_tokens))
        if self._fixed is not None:
            return work(of_equal_size(count, lengths, self._fixed))
        size = max(1, min(count, self.fitting or count))
        while True:
            try:
                return work(of_equal_size(count, lengths, size))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise UserError(
                        "actor.micro_batch_size=auto: not even one sample fits in memory: "
                        f"{first_line(error)} Set actor.gradient_checkpointing=true, use a smaller model, or "
                        "shorter inputs"
                    ) from error
            # Out of the except block: the error holds the frames, and so the tensors, of the failed pass.
            size = max(1, size // 2)
            self.fitting = size
            for policy in self._started:
                if isinstance(policy, FSDPModule):
                    policy.reset_iter_state()
                policy.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


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


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the system had no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
