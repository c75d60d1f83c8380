"""LeRobot's format v3.0: paths, the description ``meta/info.json``, statistics. No torch, no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

VERSION: Final = "v3.0"
INFO: Final = "meta/info.json"
STATS: Final = "meta/stats.json"
TASKS: Final = "meta/tasks.parquet"
EPISODES: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_PER_CHUNK: Final = 1000
"""Files of a ``chunk-xxx`` folder."""
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200
"""A file that has reached this size takes no further episode."""

STATE: Final = "observation.state"
ACTION: Final = "action"
IMAGES: Final = "observation.images."
"""Followed by the camera's name."""
_INDEX_FEATURES: Final[Mapping[str, str]] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Features of every data set. ``timestamp``: seconds since the episode's start; ``index`` counts all frames."""
OUTCOMES: Final[Mapping[str, str]] = {"next.reward": "float32", "next.done": "bool", "next.success": "bool"}
"""Outcome of a step: the simulator's reward level, the episode's last step, the goal holds."""
DISTURBED: Final = "disturbed"
"""Whether something else than the action was executed, which nothing foretold (``collect.noise_bursts``): neither this
frame nor what answers it is to be predicted from the frames before."""
QUANTILES: Final[Mapping[str, float]] = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_LEVELS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The contents of one frame."""

    cameras: Mapping[str, tuple[int, int]]
    """Camera -> (height, width)."""
    state_dim: int
    """0: there is no state, only pictures."""
    action_dim: int
    fps: float
    """Control steps a second."""
    videos: bool
    """Images lie in MP4 files; False: as PNG in the parquet files."""
    disturbed: bool = False
    """It says whether it is :data:`DISTURBED`."""


def features(shapes: Shapes) -> dict[str, dict[str, Any]]:
    """The ``features`` of ``info.json``."""
    numbers = {STATE: shapes.state_dim, ACTION: shapes.action_dim}
    described: dict[str, dict[str, Any]] = {
        name: {"dtype": "float32", "shape": [size], "names": None} for name, size in numbers.items() if size
    }
    for camera, (height, width) in shapes.cameras.items():
        image: dict[str, Any] = {
            "dtype": "video" if shapes.videos else "image",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
        if shapes.videos:
            image["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": shapes.fps,
                "video.channels": 3,
                "has_audio": False,
            }
        described[IMAGES + camera] = image
    marks = {DISTURBED: "bool"} if shapes.disturbed else {}
    for name, dtype in {**_INDEX_FEATURES, **OUTCOMES, **marks}.items():
        described[name] = {"dtype": dtype, "shape": [1], "names": None}
    return described


def new_info(shapes: Shapes, robot_type: str) -> dict[str, Any]:
    """``info.json`` of a data set without episodes."""
    return {
        "codebase_version": VERSION,
        "robot_type": robot_type,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": DATA_FILE_MB,
        "video_files_size_in_mb": VIDEO_FILE_MB,
        "fps": int(shapes.fps) if float(shapes.fps).is_integer() else shapes.fps,
        "splits": {"train": "0:0"},
        "data_path": DATA,
        "video_path": VIDEOS if shapes.videos and shapes.cameras else None,
        "features": features(shapes),
    }


def numbered(pattern: str, number: int, **names: str) -> str:
    """The path of file ``number``, counted over all chunks."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return pattern.format(chunk_index=chunk, file_index=file, **names)


def file_columns(number: int, prefix: str) -> dict[str, int]:
    """Columns of an episode's record that say in which file a part of it is."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}


def number_statistics(values: NDArray[Any]) -> dict[str, Any]:
    """Statistics of ``values`` [T,D] or [T], for each of the D numbers: min, max, mean, std (divided by T) and linearly
    interpolated quantiles; ``count`` is [T]."""
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found |= {name: np.quantile(rows, q, axis=0) for name, q in QUANTILES.items()}
    listed: dict[str, Any] = {name: column.tolist() for name, column in found.items()}
    return listed | {"count": [len(rows)]}


def histogram(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[3,256]: the number of pixels of ``images`` [T,H,W,3] with each level, by channel."""
    return np.stack([np.bincount(images[..., channel].ravel(), minlength=_LEVELS) for channel in range(3)])


def image_statistics(counts: NDArray[np.int64], frames: int) -> dict[str, Any]:
    """Statistics of images with the pixel levels ``counts`` [3,256]: levels as fractions of 255, each [3,1,1];
    ``count`` is in frames. A quantile is the smallest level that at least such a part of the pixels does not exceed."""
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


def merged_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of several episodes' images together, from :func:`image_statistics` of each. Quantiles are the
    episodes' means, as ``lerobot`` merges them; all else is exact."""
    weights = np.array([part["count"][0] for part in parts], dtype=np.float64)
    weights = (weights / weights.sum())[:, None, None, None]
    columns = {name: np.array([part[name] for part in parts]) for name in parts[0] if name != "count"}
    found = {name: (column * weights).sum(0) for name, column in columns.items()}
    found["min"], found["max"] = columns["min"].min(0), columns["max"].max(0)
    variances = columns["std"] ** 2 + (columns["mean"] - found["mean"]) ** 2
    found["std"] = np.sqrt((variances * weights).sum(0))
    shaped: dict[str, Any] = {name: value.tolist() for name, value in found.items()}
    return shaped | {"count": [int(sum(part["count"][0] for part in parts))]}
