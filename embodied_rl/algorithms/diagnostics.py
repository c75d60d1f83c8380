"""Numbers about an update that combine exactly over micro-batches and ranks.

A mean is kept as (sum, count) and a maximum as itself, so adding up parts gives what the whole would have given.
Nothing is read from the device until :meth:`Diagnostics.result`. Some numbers may lie on an accelerator and others on
the CPU, where what is known before the first pass is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


class Diagnostics:
    """Named means and maxima."""

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}
        """Name -> [2] float64: sum, count."""
        self._maxima: dict[str, Tensor] = {}
        """Name -> [] float64."""

    @torch.no_grad()
    def add_mean(self, name: str, units: Tensor, mask: Tensor, *, zeroed: bool = False) -> None:
        """Add the units where ``mask`` (same shape, bool) is true to the mean called ``name``.

        Args:
            zeroed: the units are 0 already where ``mask`` is false, which saves most of the cost.
        """
        if units.dtype == torch.bool:
            total = (units & mask).count_nonzero()
        else:
            total = (units if zeroed else torch.where(mask, units, 0.0)).sum(dtype=torch.float64)
        self._add(name, torch.stack((total.double(), mask.count_nonzero().double())))

    @torch.no_grad()
    def add_max(self, name: str, units: Tensor, mask: Tensor) -> None:
        """Let the units where ``mask`` is true compete for the maximum called ``name``."""
        # An empty micro-batch has no maximum; torch would raise.
        if units.numel():
            self._compete(name, torch.where(mask, units, -torch.inf).max().double())
        else:
            self._compete(name, units.new_full((), -torch.inf, dtype=torch.float64))

    def pair(self, name: str) -> Tensor:
        """[2] float64: sum and count of the mean called ``name``; zeros before anything was added."""
        return self._means.get(name, torch.zeros(2, dtype=torch.float64))

    def merge(self, other: Diagnostics) -> None:
        """Add another part's numbers, for instance the next micro-batch's."""
        for name, pair in other._means.items():
            self._add(name, pair)
        for name, value in other._maxima.items():
            self._compete(name, value)

    def reduce(self, reduce_sum: Reduce, reduce_max: Reduce) -> None:
        """Combine over ranks with two collectives; every rank must hold the same names.

        Args:
            reduce_sum: sums a float64 tensor over ranks.
            reduce_max: takes the elementwise maximum over ranks.
        """
        for table, combine in ((self._means, reduce_sum), (self._maxima, reduce_max)):
            names = sorted(table)
            if names:
                # The accelerator's, if any are there: one read of it then gives all.
                device = max((table[name].device for name in names), key=lambda device: device.type != "cpu")
                stacked = torch.stack([table[name].to(device) for name in names])
                table.update(zip(names, combine(stacked), strict=True))

    def result(self) -> dict[str, float]:
        """Name -> number. A name without a single unit is left out: it has no value."""
        numbers: dict[str, float] = {}
        for name, pair in self._means.items():
            total, count = pair.tolist()
            if count:
                numbers[name] = total / count
        for name, value in self._maxima.items():
            if (largest := value.item()) != -torch.inf:
                numbers[name] = largest
        return numbers

    def _add(self, name: str, pair: Tensor) -> None:
        known = self._means.get(name)
        self._means[name] = pair if known is None else known + pair.to(known.device)

    def _compete(self, name: str, value: Tensor) -> None:
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value.to(known.device))
