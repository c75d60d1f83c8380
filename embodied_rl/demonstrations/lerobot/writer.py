"""Puts finished episodes into a LeRobot v3.0 data set: a new one, or behind the episodes of one that exists.

Files are only ever added, and ``meta/info.json``, which says how many episodes there are, is replaced last. A process
that is killed on the way leaves files that nothing refers to; the next one writes them anew.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.demonstrations.lerobot.episode import StagedEpisode, join_videos
from embodied_rl.demonstrations.lerobot.metadata import IMAGES, Shapes
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.files import atomic, write_json

FACTS: Final = ("success", "task_id", "demonstration", "attempt", "reset_state_id")
"""Columns of an episode's record beyond the format."""
START_LEVEL: Final = "start_level"
"""Another one: the reward level before the first frame, as :class:`Steps` has it."""
TERMINATED: Final = "terminated"
"""Another one: the simulator ended the episode with its last frame, as :class:`Steps` has it."""
_SINCE: Final = (START_LEVEL, TERMINATED)
"""Those that earlier versions did not have."""


def append(root: Path, episodes: Sequence[StagedEpisode], shapes: Shapes, *, robot_type: str) -> None:
    """Add ``episodes``, in this order, to the data set in ``root``, which is made if it does not exist.

    Args:
        shapes: of all its frames.
        robot_type: of a new data set, for ``info.json``.
    """
    known = (root / metadata.INFO).exists()
    source = DataSet.open(root) if known else DataSet(root, metadata.new_info(shapes, robot_type))
    info, files = dict(source.info), 0
    instructions: list[str] = []
    since: Sequence[str] = _SINCE
    if info["total_episodes"]:
        records = source.episodes()
        numbers = [metadata.FILES_PER_CHUNK * e["data/chunk_index"] + e["data/file_index"] for e in records]
        files, instructions = 1 + max(numbers), source.tasks()
        since = [name for name in _SINCE if name in records[0]]  # lerobot wants the same columns in all files
    _remove_unfinished(root, info, files)
    for file, share in enumerate(_shares(episodes), start=files):
        instructions += dict.fromkeys(e.facts.instruction for e in share if e.facts.instruction not in instructions)
        _write_files(root, share, shapes, file, info, instructions, since)
        info["total_episodes"] += len(share)
        info["total_frames"] += sum(episode.facts.length for episode in share)
    _write_tasks(root, instructions)
    info |= {"total_tasks": len(instructions), "splits": {"train": f"0:{info['total_episodes']}"}}
    write_json(root / metadata.STATS, _overall(DataSet(root, info)), allow_nan=True)
    write_json(root / metadata.INFO, info)


def _remove_unfinished(root: Path, info: Mapping[str, Any], first: int) -> None:
    """Files from number ``first`` on, which a killed process left."""
    videos = [(metadata.VIDEOS, key) for key, f in info["features"].items() if f["dtype"] == "video"]
    for pattern, key in ((metadata.DATA, ""), (metadata.EPISODES, ""), *videos):
        number = first
        while (path := root / metadata.numbered(pattern, number, video_key=key)).exists():
            path.unlink()
            number += 1


def _shares(episodes: Sequence[StagedEpisode]) -> Iterator[list[StagedEpisode]]:
    """Runs of episodes whose files stay within the format's sizes."""
    share: list[StagedEpisode] = []
    used: dict[str, float] = {}
    for episode in episodes:
        sizes = {path.name: path.stat().st_size / 2**20 for path in episode.folder.iterdir()}
        limits = {name: metadata.VIDEO_FILE_MB if name.endswith(".mp4") else metadata.DATA_FILE_MB for name in sizes}
        if share and any(used.get(name, 0) + size > limits[name] for name, size in sizes.items()):
            yield share
            share, used = [], {}
        share.append(episode)
        used = {name: used.get(name, 0) + size for name, size in sizes.items()}
    if share:
        yield share


def _write_files(
    root: Path,
    episodes: Sequence[StagedEpisode],
    shapes: Shapes,
    file: int,
    info: Mapping[str, Any],
    instructions: Sequence[str],
    since: Sequence[str],
) -> None:
    """Write file number ``file`` of each kind, whose episodes come after those that ``info`` counts.

    Args:
        since: those of :data:`_SINCE` that the data set has.
    """
    columns: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    first_frame = frame = info["total_frames"]
    for number, episode in enumerate(episodes, start=info["total_episodes"]):
        facts, length = episode.facts, episode.facts.length
        task = instructions.index(facts.instruction)
        frames = _frames(episode, shapes, number, frame, task)
        columns.append(frames)
        record: dict[str, Any] = {
            "episode_index": number,
            "tasks": [facts.instruction],
            "length": length,
            "dataset_from_index": frame,
            "dataset_to_index": frame + length,
            **metadata.file_columns(file, "data"),
            **metadata.file_columns(file, "meta/episodes"),
            **{name: getattr(facts, name) for name in FACTS},
            **{name: episode.fact(name) for name in since},
        }
        for camera in shapes.cameras if shapes.videos else ():
            key = f"videos/{IMAGES}{camera}"
            record |= metadata.file_columns(file, key) | {
                f"{key}/from_timestamp": (frame - first_frame) / shapes.fps,
                f"{key}/to_timestamp": (frame - first_frame + length) / shapes.fps,
            }
        records.append(record | _statistics(episode, shapes, frames))
        frame += length
    for camera in shapes.cameras if shapes.videos else ():
        path = root / metadata.numbered(metadata.VIDEOS, file, video_key=IMAGES + camera)
        path.parent.mkdir(parents=True, exist_ok=True)
        join_videos(path, [episode.video(camera) for episode in episodes], shapes.fps)
    schema = _schema(shapes)
    merged = {name: [row for part in columns for row in part[name]] for name in schema.names}
    _write(root / metadata.numbered(metadata.DATA, file), pa.table(merged, schema=schema))
    _write(root / metadata.numbered(metadata.EPISODES, file), pa.Table.from_pylist(records))


def _frames(episode: StagedEpisode, shapes: Shapes, number: int, first_frame: int, task: int) -> dict[str, Any]:
    """Columns of the episode's frames."""
    steps, length = episode.steps(), episode.facts.length
    index = np.arange(length)
    numbers = {metadata.STATE: steps["state"], metadata.ACTION: steps["actions"]}
    columns: dict[str, Any] = {
        **{name: rows if rows.shape[1] > 1 else rows.ravel() for name, rows in numbers.items() if rows.shape[1]},
        "timestamp": (index / shapes.fps).astype(np.float32),
        "frame_index": index,
        "episode_index": np.full(length, number),
        "index": first_frame + index,
        "task_index": np.full(length, task),
        "next.reward": steps["rewards"],
        "next.done": index == length - 1,
        "next.success": steps["success"],
    }
    if shapes.disturbed:
        columns[metadata.DISTURBED] = steps["disturbed"]
    for camera in () if shapes.videos else shapes.cameras:
        columns[IMAGES + camera] = [{"bytes": _png(image), "path": None} for image in episode.images(camera)]
    return columns


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _schema(shapes: Shapes) -> pa.Schema:
    """The columns of the frames' table."""
    fields = []
    for name, feature in metadata.features(shapes).items():
        if feature["dtype"] == "image":
            fields.append((name, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
        elif feature["dtype"] != "video":
            kind = pa.type_for_alias(feature["dtype"])
            [size] = feature["shape"]
            fields.append((name, pa.list_(kind, size) if size > 1 else kind))
    return pa.schema(fields)


def _statistics(episode: StagedEpisode, shapes: Shapes, frames: dict[str, Any]) -> dict[str, Any]:
    """The record's columns ``stats/<feature>/<name>``."""
    columns = {name: np.asarray(column) for name, column in frames.items() if not name.startswith(IMAGES)}
    found = {name: metadata.number_statistics(column) for name, column in columns.items()}
    for camera in shapes.cameras:
        found[IMAGES + camera] = metadata.image_statistics(episode.histogram(camera), episode.facts.length)
    return {f"stats/{feature}/{name}": value for feature, its in found.items() for name, value in its.items()}


def _overall(data: DataSet) -> dict[str, Any]:
    """The content of ``stats.json``."""
    records = data.episodes()
    found: dict[str, Any] = {}
    for name, feature in data.info["features"].items():
        if feature["dtype"] in ("video", "image"):
            prefix = f"stats/{name}/"
            parts = [{k.removeprefix(prefix): v for k, v in r.items() if k.startswith(prefix)} for r in records]
            found[name] = metadata.merged_statistics(parts)
        else:
            found[name] = metadata.number_statistics(data.column(name))
    return found


def _write_tasks(root: Path, instructions: Sequence[str]) -> None:
    """The instructions are the index of a pandas table, as ``lerobot`` reads it."""
    description = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
        ],
        "pandas_version": "2.2.0",
    }
    for column in description["columns"]:
        column["metadata"] = None
    table = pa.table({"task_index": list(range(len(instructions))), "task": list(instructions)})
    _write(root / metadata.TASKS, table.replace_schema_metadata({"pandas": json.dumps(description)}))


def _write(path: Path, table: pa.Table) -> None:
    with atomic(path) as scratch:
        pq.write_table(table, scratch)
