"""Shares of several data sets in a training step. No torch: rules ask before a run starts anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shares_of(weights: Sequence[float], batch_size: int) -> list[int]:
    """How many of ``batch_size`` frames each weight stands for: whole numbers that add up, by largest remainders."""
    exact = np.array(weights) / np.sum(weights) * batch_size
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: batch_size - shares.sum()]] += 1
    return shares.tolist()
