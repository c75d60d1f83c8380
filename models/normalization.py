"""Running statistics of what a policy sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

EPSILON = 1e-8
"""Added to variances: a number that never changes becomes 0."""
LIMIT = 10.0
"""Normalised numbers are cut off beyond this."""


class RunningNormalizer(nn.Module):
    """Subtracts the mean of all that was seen so far and divides by its standard deviation.

    The statistics are buffers, so they are saved and sent with the weights, and change in :meth:`update` alone: between
    two updates the same numbers come out of the same input.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[...,S] -> [...,S]; unchanged, within the limit, before the first update."""
        scaled = (x - self.mean) / (self.variance + EPSILON).sqrt()
        return scaled.clamp(-LIMIT, LIMIT).to(x.dtype)

    @torch.no_grad()
    def update(self, seen: Iterable[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
        """Add samples, [*,S] each, to the statistics (Chan et al. 1979, "Updating formulae and a pairwise algorithm").

        Args:
            reduce: sums a float64 tensor over all ranks, each with samples of its own: a collective.
        """
        batches = [samples.to(self.mean) for samples in seen]

        def summed(units: Callable[[Tensor], Tensor]) -> Tensor:
            own = torch.stack([torch.zeros_like(self.mean), *(units(batch).sum(0) for batch in batches)]).sum(0)
            return reduce(own.cpu()).to(self.mean)

        count = summed(torch.ones_like)
        if not count.all():
            return
        mean = summed(lambda batch: batch) / count
        # About their own mean: the difference of large squares would lose the small ones.
        squares = summed(lambda batch: (batch - mean).square())
        before, everything = self.count, self.count + count[0]
        between = (mean - self.mean).square() * before * count / everything
        self.variance.copy_((self.variance * before + squares + between) / everything)
        self.mean.add_((mean - self.mean) * count / everything)
        self.count.copy_(everything)
