"""Statistics as ``meta/stats.json`` and the episodes' records have them: exact, over all frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

QUANTILES: Final[Mapping[str, float]] = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_LEVELS: Final = 256


def of_numbers(values: NDArray[Any]) -> dict[str, Any]:
    """Of ``values`` [T,D] or [T], for each of the D numbers: min, max, mean, std (divided by T) and quantiles, linearly
    interpolated; ``count`` is [T]."""
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
    listed: dict[str, Any] = {name: column.tolist() for name, column in found.items()}
    return listed | {"count": [len(rows)]}


def histogram(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[3,256]: how many pixels of ``images`` [T,H,W,3] have which level in each channel."""
    return np.stack([np.bincount(images[..., channel].ravel(), minlength=_LEVELS) for channel in range(3)])


def of_histogram(counts: NDArray[np.int64], frames: int) -> dict[str, Any]:
    """Of images with the pixel levels ``counts`` [3,256]: levels as fractions of 255, each [3,1,1]; ``count`` is in
    frames. A quantile is the smallest level that at least so large a part of the pixels does not exceed."""
    levels = np.arange(_LEVELS) / (_LEVELS - 1)
    total = counts.sum(1)
    cumulated = counts.cumsum(1)
    mean = counts @ levels / total
    variance = np.maximum(counts @ levels**2 / total - mean**2, 0.0)
    present = counts > 0
    found = {
        "min": levels[present.argmax(1)],
        "max": levels[_LEVELS - 1 - present[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(variance),
    }
    found |= {name: levels[(cumulated >= q * total[:, None]).argmax(1)] for name, q in QUANTILES.items()}
    shaped: dict[str, Any] = {name: column.reshape(3, 1, 1).tolist() for name, column in found.items()}
    return shaped | {"count": [frames]}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several episodes' images together, from :func:`of_histogram` of each. Quantiles are the episodes' means, as
    ``lerobot`` merges them; all else is exact."""
    weights = np.array([part["count"][0] for part in parts], dtype=np.float64)
    weights = (weights / weights.sum())[:, None, None, None]
    columns = {name: np.array([part[name] for part in parts]) for name in parts[0] if name != "count"}
    found = {name: (column * weights).sum(0) for name, column in columns.items()}
    found["min"], found["max"] = columns["min"].min(0), columns["max"].max(0)
    variances = columns["std"] ** 2 + (columns["mean"] - found["mean"]) ** 2
    found["std"] = np.sqrt((variances * weights).sum(0))
    shaped: dict[str, Any] = {name: value.tolist() for name, value in found.items()}
    return shaped | {"count": [int(sum(part["count"][0] for part in parts))]}
