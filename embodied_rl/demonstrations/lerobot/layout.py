"""Where a LeRobot v3.0 data set keeps what, and how ``meta/info.json`` describes it. No torch, no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
"""Of every data set. ``timestamp`` is seconds since the episode's start; ``index`` counts all episodes' frames."""
OUTCOMES: Final[Mapping[str, str]] = {"next.reward": "float32", "next.done": "bool", "next.success": "bool"}
"""What a step led to: the simulator's reward level, the episode's last step, the goal holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What one frame holds."""

    cameras: Mapping[str, tuple[int, int]]
    """Camera -> (height, width)."""
    state_dim: int
    action_dim: int
    fps: float
    """Control steps a second."""
    videos: bool
    """Images lie in MP4 files; False: as PNG in the parquet files."""


def features(shapes: Shapes) -> dict[str, dict[str, Any]]:
    """The ``features`` of ``info.json``."""
    described: dict[str, dict[str, Any]] = {
        STATE: {"dtype": "float32", "shape": [shapes.state_dim], "names": None},
        ACTION: {"dtype": "float32", "shape": [shapes.action_dim], "names": None},
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
    for name, dtype in (_INDEX_FEATURES | OUTCOMES).items():
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


def place(number: int, prefix: str) -> dict[str, int]:
    """Columns of an episode's record that say in which file something of it is."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}
