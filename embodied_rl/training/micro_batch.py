"""How many samples go through the network at once: as configured, or as many as fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from embodied_rl.errors import UserError
from embodied_rl.schema import MicroBatchSize

T = TypeVar("T")


class MicroBatch:
    """The size of a micro-batch.

    With ``auto`` all samples are tried at once first. Where memory runs out the size is halved for the rest of the run,
    and the work is done again from its beginning. That needs a single rank: others would wait for the one that failed.

    Args:
        policies: sharded ones that the work passes through; what an interrupted pass left in them is thrown away.

    Raises:
        UserError: this torch cannot do that.
    """

    def __init__(self, size: MicroBatchSize, *policies: nn.Module) -> None:
        self._fixed = size if size != "auto" else None
        self._fitting: int | None = None
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

    @property
    def fitting(self) -> int | None:
        """What was found to fit; None where nothing was tried."""
        return self._fitting

    def run(self, count: int, work: Callable[[int], T]) -> T:
        """``work(size)`` on ``count`` samples.

        Raises:
            UserError: not even one sample fits.
        """
        if self._fixed is not None:
            return work(self._fixed)
        size = max(1, min(count, self._fitting or count))
        while True:
            try:
                return work(size)
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error):
                    raise
                if size == 1:
                    raise UserError(
                        "actor.micro_batch_size=auto: not even one sample fits in memory: "
                        f"{str(error).splitlines()[0]} Set actor.gradient_checkpointing=true, use a smaller model, or "
                        "shorter inputs"
                    ) from error
            # Out of the except block: the error holds the frames, and so the tensors, of the failed pass.
            size = max(1, size // 2)
            self._fitting = size
            for policy in self._started:
                assert isinstance(policy, FSDPModule)
                policy.reset_iter_state()
                policy.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
