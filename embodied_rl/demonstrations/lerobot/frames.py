"""Every image of a data set at hand: decoded once into memory-mapped arrays beside it.

A video gives its frames only one after the other, and training wants any 64 of them at once. The arrays are in
``<data set>/.cache/``, belong to the files as they are now, and are made anew when those change.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from embodied_rl.demonstrations.lerobot import video
from embodied_rl.demonstrations.lerobot.tables import damaged
from embodied_rl.errors import UserError
from embodied_rl.files import atomic

CACHE: Final = ".cache"
_REPORT_EVERY: Final = 100

ReportProgress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


def open_frames(
    root: Path,
    info: Mapping[str, Any],
    episodes: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    report: ReportProgress,
) -> dict[str, NDArray[np.uint8]]:
    """Image feature -> [F,H,W,3] RGB of all frames, read-only and memory-mapped.

    The first process decodes; others that come meanwhile wait for it.

    Raises:
        UserError: a damaged video or image, or no room on the disk.
    """
    directory = root / CACHE / _fingerprint(root, info)
    paths = {key: directory / f"{key}.npy" for key in keys}
    if not all(path.exists() for path in paths.values()):
        try:
            with _locked(root / CACHE / "lock"):
                _forget_others(directory)
                for key, path in paths.items():
                    if not path.exists():
                        with atomic(path) as scratch:
                            _decode(root, info, episodes, key, scratch, report)
        except OSError as error:
            raise UserError(
                f"{directory}: the decoded images cannot be written ({error}); they need "
                f"{_size(info, keys) / 2**30:.1f} GiB: make room, or copy the data set to where you may write"
            ) from error
    return {key: np.load(path, mmap_mode="r") for key, path in paths.items()}


def _size(info: Mapping[str, Any], keys: Sequence[str]) -> int:
    return sum(info["total_frames"] * int(np.prod(info["features"][key]["shape"])) for key in keys)


def _fingerprint(root: Path, info: Mapping[str, Any]) -> str:
    """Changes with the description and with every file's name, size and time."""
    files = sorted(path for folder in ("data", "videos") for path in (root / folder).rglob("[!.]*") if path.is_file())
    facts = [(str(f.relative_to(root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([info, facts], sort_keys=True).encode()).hexdigest()[:16]


def _forget_others(directory: Path) -> None:
    """Arrays of what the data set was before."""
    for path in directory.parent.iterdir():
        if path.is_dir() and path != directory:
            shutil.rmtree(path)
    directory.mkdir(exist_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system gives it back when the process dies
        yield


def _decode(
    root: Path,
    info: Mapping[str, Any],
    episodes: Sequence[Mapping[str, Any]],
    key: str,
    path: Path,
    report: ReportProgress,
) -> None:
    """One feature's array."""
    height, width = _height_and_width(info["features"][key])
    total = info["total_frames"]
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(total, height, width, 3))
    found = np.zeros(total, dtype=np.bool_)
    of_video = info["features"][key]["dtype"] == "video"
    source = _from_videos(root, info, episodes, key) if of_video else _from_tables(root, key)
    for done, (index, image) in enumerate(source):
        if image.shape != (height, width, 3):
            raise damaged(root, f"an image of {key} is {list(image.shape)}, info.json says {[height, width, 3]}")
        if index < total:  # behind it is what a killed process left
            images[index], found[index] = image, True
        if done % _REPORT_EVERY == 0:
            report(f"decoding {key}", done, total)
    if not found.all():
        first = int(found.argmin())
        raise damaged(root, f"{key} lacks {total - int(found.sum())} of {total} frames, the first is {first}")
    images.flush()
    del images
    report(f"decoding {key}", total, total)


def _height_and_width(feature: Mapping[str, Any]) -> tuple[int, int]:
    """Some data sets put the channels first."""
    shape, names = list(feature["shape"]), feature.get("names") or ["height", "width", "channels"]
    return (shape[1], shape[2]) if str(names[0]).startswith("channel") else (shape[0], shape[1])


def _from_videos(
    root: Path, info: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]], key: str
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(frame index, image) of every frame. A file holds the episodes of a stretch of time each."""
    fps, prefix = info["fps"], f"videos/{key}"
    by_file: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for episode in episodes:
        place = (episode[f"{prefix}/chunk_index"], episode[f"{prefix}/file_index"])
        by_file.setdefault(place, []).append(episode)
    for (chunk, file), inside in by_file.items():
        inside = sorted(inside, key=lambda e: e[f"{prefix}/from_timestamp"])
        starts = np.array([e[f"{prefix}/from_timestamp"] for e in inside])
        path = root / info["video_path"].format(video_key=key, chunk_index=chunk, file_index=file)
        if not path.is_file():
            raise damaged(path, "no such file")
        for seconds, image in video.decode(path):
            episode = inside[max(int(np.searchsorted(starts, seconds + 0.5 / fps)) - 1, 0)]
            step = round((seconds - episode[f"{prefix}/from_timestamp"]) * fps)
            if 0 <= step < episode["length"]:
                yield episode["dataset_from_index"] + step, image


def _from_tables(root: Path, key: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """As :func:`_from_videos`, for images that are stored in the parquet files."""
    index = 0
    for path in sorted((root / "data").glob("[!.]*/[!.]*.parquet")):
        try:
            for batch in pq.ParquetFile(path).iter_batches(columns=[key], batch_size=64):
                for image in batch.column(0).to_pylist():
                    with Image.open(io.BytesIO(image["bytes"])) as picture:
                        yield index, np.asarray(picture.convert("RGB"))
                    index += 1
        except (pa.ArrowException, UnidentifiedImageError, TypeError, KeyError) as error:
            raise damaged(path, error) from error
