"""Collectives of a pass through sharded policies, which a rank that ran out of memory in it completes all the same.

FSDP gathers parameters and reduces gradients within a pass, block by block, and the other ranks of a collective wait
for the one that is missing. So the rank that ran out makes the pass again with a sample that counts for nothing:
collectives that it took part in before are left out, and the rest are made, in the same order and of the same sizes,
since neither depends on the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from embodied_rl.training.sharding import is_sharded


class PassCollectives:
    """Counts the collectives of this process's passes, and leaves some out when a pass is made again."""

    def __init__(self) -> None:
        self._made = self._left = 0
        self._gather, self._reduce = _AllGather(self), _ReduceScatter(self)

    def watch(self, policies: Iterable[nn.Module]) -> None:
        """Count those of the policies, sharded over all ranks (``full_shard``)."""
        for module in (module for policy in policies for module in policy.modules()):
            if is_sharded(module):
                module.set_custom_all_gather(self._gather)
                module.set_custom_reduce_scatter(self._reduce)

    def begin(self) -> None:
        """A pass begins."""
        self._made = self._left = 0

    def begin_again(self) -> None:
        """It begins anew: those that it made are left out."""
        self._left, self._made = self._made, 0

    def leaves_out(self) -> bool:
        """The next one was made before."""
        left, self._left = self._left > 0, max(0, self._left - 1)
        return left

    def note(self) -> None:
        """One was made."""
        self._made += 1


class _AllGather(DefaultAllGather):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._collectives.leaves_out():
            # The values do not matter, but as parameters they must give numbers.
            for part in output_tensor.view(group.size(), -1):
                part.copy_(input_tensor)
            return None
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        self._collectives.note()
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._collectives.leaves_out():
            output_tensor.zero_()
            return None
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._collectives.note()
        return work


PASS_COLLECTIVES: Final = PassCollectives()
"""A process is one rank, whose passes follow one another."""
