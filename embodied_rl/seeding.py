"""Randomness as a function of the position in a run, such as (seed, step, rank).

Nothing has to be remembered to resume, and two positions share no numbers (numpy's ``SeedSequence`` mixes them), but
for zeros at the end: (0, 7) and (0, 7, 0) are the same.
"""

from __future__ import annotations

import numpy as np


def generator(*position: int, spawn_key: tuple[int, ...] = ()) -> np.random.Generator:
    """numpy's generator at a position in the run, the run's seed among its numbers."""
    return np.random.default_rng(np.random.SeedSequence(position, spawn_key=spawn_key))


def derived_seed(*position: int, bits: int = 63) -> int:
    """A seed of ``bits`` bits, at most 64, for other libraries' generators."""
    dtype = np.dtype(np.uint64 if bits > 32 else np.uint32)
    return int(np.random.SeedSequence(position).generate_state(1, dtype.type)[0] >> (8 * dtype.itemsize - bits))
