"""Reading a LeRobot v3.0 data set, whoever wrote it, with clear messages.

A video gives its frames only one after the other, and training wants any 64 of them at once. So images are decoded once
into memory-mapped arrays in ``<data set>/.cache/``, which belong to the files as they are now and are made anew when
those change.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.demonstrations.lerobot.episode import STAGING, decode_video
from embodied_rl.errors import UserError, first_line, suggestion
from embodied_rl.files import atomic, locked, parse_json, remove

CACHE: Final = ".cache"
_REPORT_EVERY: Final = 100
_CONVERTER: Final = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=<name>"

ReportProgress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """The files of a data set.

    Raises:
        UserError: from every method, where a file is damaged.
    """

    root: Path
    info: Mapping[str, Any]
    """The content of ``meta/info.json``."""

    @classmethod
    def open(cls, root: Path) -> DataSet:
        """Read ``meta/info.json``.

        Raises:
            UserError: no data set, one of another version, or a damaged one.
        """
        path = root / metadata.INFO
        if not path.is_file():
            raise _no_data_set(root)
        try:
            info = parse_json(path.read_text())
            version = str(info["codebase_version"])
            missing = {"fps", "features", "data_path", "total_episodes", "total_frames"} - set(info)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
        if not version.startswith("v3."):
            raise UserError(f"{root}: LeRobot format {version}, expected {metadata.VERSION}. {_conversion(version)}")
        if missing:
            raise damaged(path, f"no {', '.join(sorted(missing))}")
        for name in ("total_episodes", "total_frames"):
            if type(info[name]) is not int or info[name] < 0:
                raise damaged(path, f"{name} is {info[name]!r}")
        return cls(root, info)

    def require(self, name: str, purpose: str) -> None:
        """Raise UserError unless ``info.json`` has the feature ``name``."""
        features = self.info["features"]
        if name not in features:
            known = ", ".join(features)
            raise UserError(
                f"{self.root}: has no feature {name!r} for {purpose}, only {known}.{suggestion(name, features)}"
            )

    def episodes(self) -> list[dict[str, Any]]:
        """A record for each of the ``total_episodes`` episodes, in order."""
        total = self.info["total_episodes"]
        table = self._read("meta/episodes")
        if missing := {"episode_index", "length"} - set(table.schema.names):
            raise damaged(self.root / "meta/episodes", f"there is no column {', '.join(sorted(missing))}")
        rows = table.to_pylist()
        rows = sorted(rows, key=lambda row: row["episode_index"])[:total]
        if [row["episode_index"] for row in rows] != list(range(total)):
            raise damaged(self.root / "meta/episodes", f"{len(rows)} of {total} episodes are there")
        if (frames := sum(row["length"] for row in rows)) != self.info["total_frames"]:
            total_frames = self.info["total_frames"]
            raise damaged(self.root / metadata.INFO, f"total_frames is {total_frames}, its episodes have {frames}")
        return rows

    def column(self, name: str) -> NDArray[Any]:
        """[F] or [F,D]: one feature of all frames, in order."""
        table, total = self._read("data", [name]), self.info["total_frames"]
        if len(table) < total:
            raise damaged(self.root / "data", f"{len(table)} of {total} frames are there")
        values = table.column(name).slice(0, total)
        if not (pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type)):
            return values.to_numpy()
        flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in values.chunks])
        if len(flat) % max(total, 1):
            raise damaged(self.root / "data", f"{name} has rows of different lengths")
        return flat.reshape(total, -1)

    def rows(self, name: str) -> NDArray[np.float32]:
        """[F,D]: one feature of all frames, finite numbers."""
        values = self.column(name)
        rows = values.astype(np.float32).reshape(len(values), -1)
        if not np.isfinite(rows).all():
            raise damaged(self.root / "data", f"{name} has numbers that are NaN or infinite")
        return rows

    def used_episodes(self, *, successes_only: bool = True) -> list[dict[str, Any]]:
        """Records of the episodes to imitate, those that are marked as failures left out.

        Raises:
            UserError: there is none.
        """
        records = self.episodes()
        if not records:
            raise UserError(f"{self.root}: the data set has no episodes; collect or copy some first")
        used = [e for e in records if not successes_only or e.get("success", True) is not False]
        if not used:
            raise UserError(f"{self.root}: all its {len(records)} episodes failed, so there is nothing to imitate")
        return used

    def image_features(self) -> list[str]:
        """Names of the features that are pictures."""
        return [name for name, feature in self.info["features"].items() if feature["dtype"] in ("video", "image")]

    def image_size(self, key: str) -> tuple[int, int]:
        """(height, width) of a feature. Some data sets put the channels first."""
        feature = self.info["features"][key]
        shape, names = list(feature["shape"]), feature.get("names") or ["height", "width", "channels"]
        return (shape[1], shape[2]) if str(names[0]).startswith("channel") else (shape[0], shape[1])

    def require_videos(self, keys: Sequence[str]) -> None:
        """Raise UserError unless the files of these features are there."""
        for key in keys:
            if self.info["features"][key]["dtype"] == "video":
                for path in self._videos(key):
                    if not path.is_file():
                        raise damaged(path, "no such file")

    def tasks(self) -> list[str]:
        """The instructions, by ``task_index``."""
        table = self._read(metadata.TASKS)
        texts = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        if not texts or "task_index" not in table.schema.names:
            names = ", ".join(table.schema.names)
            raise damaged(self.root / metadata.TASKS, f"got columns {names}, expected task_index and a text")
        pairs = zip(table.column("task_index").to_pylist(), table.column(texts[0]).to_pylist(), strict=True)
        by_index = dict(pairs)
        if sorted(by_index) != list(range(len(by_index))):
            raise damaged(self.root / metadata.TASKS, f"got task_index {sorted(by_index)}")
        return [by_index[index] for index in range(len(by_index))]

    def frames(self, sizes: Mapping[str, tuple[int, int]], report: ReportProgress) -> dict[str, NDArray[np.uint8]]:
        """Image feature -> [F,H,W,3] RGB of all frames, read-only and memory-mapped.

        The first process decodes; others that come meanwhile wait for it.

        Args:
            sizes: image feature -> (H, W); where that is not the recorded size, pictures are stretched.

        Raises:
            UserError: a damaged video or image, or no room on the disk.
        """
        directory = self.root / CACHE / self._fingerprint()
        paths = {
            key: directory / f"{key}{'' if size == self.image_size(key) else '.{}x{}'.format(*size)}.npy"
            for key, size in sizes.items()
        }
        if not all(path.exists() for path in paths.values()):
            try:
                with locked(directory.with_name("lock")):
                    for path in directory.parent.iterdir():  # of what the data set was before
                        if path.is_dir() and path != directory:
                            remove(path)
                    for key, path in paths.items():
                        if not path.exists():
                            with atomic(path, shared=True) as scratch:
                                self._decode(key, sizes[key], scratch, report)
            except OSError as error:
                size = 3 * self.info["total_frames"] * sum(height * width for height, width in sizes.values())
                raise UserError(
                    f"{directory}: the decoded images cannot be written ({error}); they need {size / 2**30:.1f} GiB: "
                    "make room, or copy the data set to where you may write"
                ) from error
        return {key: np.load(path, mmap_mode="r") for key, path in paths.items()}

    def _read(self, where: str, columns: list[str] | None = None) -> pa.Table:
        """A parquet file, or all those of a folder, in the order of their names."""
        path = self.root / where
        files = [path] if path.suffix else _parquet_files(path)
        if not files:
            raise damaged(path, "no parquet file")
        parts = []
        for file in files:
            try:
                parts.append(pq.ParquetFile(file).read(columns=columns))
            except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors derive from these
                raise damaged(file, error) from error
        return pa.concat_tables(parts, promote_options="permissive")

    def _fingerprint(self) -> str:
        """Changes with the description and with every file's name, size and time."""
        found = [path for folder in ("data", "videos") for path in (self.root / folder).rglob("[!.]*")]
        files = sorted(path for path in found if path.is_file())
        facts = [(str(f.relative_to(self.root)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return hashlib.sha256(json.dumps([self.info, facts], sort_keys=True).encode()).hexdigest()[:16]

    def _decode(self, key: str, size: tuple[int, int], path: Path, report: ReportProgress) -> None:
        """Write one feature's array, of images of ``size``."""
        feature, total = self.info["features"][key], self.info["total_frames"]
        height, width = self.image_size(key)
        images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(total, *size, 3))
        found = np.zeros(total, dtype=np.bool_)
        source = self._from_videos(key) if feature["dtype"] == "video" else self._from_tables(key)
        for done, (index, image) in enumerate(source):
            if image.shape != (height, width, 3):
                got = f"an image of {key} is {list(image.shape)}, info.json says {[height, width, 3]}"
                raise damaged(self.root, got)
            if index < total:  # behind it is what a killed process left
                images[index], found[index] = image if size == (height, width) else _resized(image, size), True
            if done % _REPORT_EVERY == 0:
                report(f"decoding {key}", done, total)
        if not found.all():
            first = int(found.argmin())
            raise damaged(self.root, f"{key} lacks {total - int(found.sum())} of {total} frames, the first is {first}")
        images.flush()
        report(f"decoding {key}", total, total)

    def _from_videos(self, key: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(frame index, image) of every frame. A file holds the episodes of a stretch of time each."""
        fps, prefix = self.info["fps"], f"videos/{key}"
        for path, inside in self._videos(key).items():
            inside = sorted(inside, key=lambda e: e[f"{prefix}/from_timestamp"])
            starts = np.array([e[f"{prefix}/from_timestamp"] for e in inside])
            if not path.is_file():
                raise damaged(path, "no such file")
            for seconds, image in decode_video(path):
                episode = inside[max(int(np.searchsorted(starts, seconds + 0.5 / fps)) - 1, 0)]
                step = round((seconds - episode[f"{prefix}/from_timestamp"]) * fps)
                if 0 <= step < episode["length"]:
                    yield episode["dataset_from_index"] + step, image

    def _videos(self, key: str) -> dict[Path, list[dict[str, Any]]]:
        """File -> records of the episodes in it."""
        by_file: dict[Path, list[dict[str, Any]]] = {}
        for episode in self.episodes():
            chunk, file = (episode[f"videos/{key}/{name}_index"] for name in ("chunk", "file"))
            name = self.info["video_path"].format(video_key=key, chunk_index=chunk, file_index=file)
            by_file.setdefault(self.root / name, []).append(episode)
        return by_file

    def _from_tables(self, key: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """As :meth:`_from_videos`, for images that are stored in the parquet files."""
        index = 0
        for path in _parquet_files(self.root / "data"):
            try:
                for batch in pq.ParquetFile(path).iter_batches(columns=[key], batch_size=64):
                    for image in batch.column(0).to_pylist():
                        with Image.open(io.BytesIO(image["bytes"])) as picture:
                            yield index, np.asarray(picture.convert("RGB"))
                        index += 1
            except (pa.ArrowException, UnidentifiedImageError, TypeError, KeyError) as error:
                raise damaged(path, error) from error


def damaged(path: Path, why: object) -> UserError:
    """The error for a file that is not as ``info.json`` says."""
    return UserError(f"{path}: cannot be read ({first_line(why)}); the data set is damaged: copy it anew")


def _no_data_set(root: Path) -> UserError:
    if (root / STAGING).is_dir():
        return UserError(
            f"{root}: the collection is not finished; repeat its task=collect command, which resumes it, "
            "or with a smaller collect.episodes_per_task for what there is"
        )
    what = "not a LeRobot data set: it has no meta/info.json" if root.is_dir() else "no such folder"
    return UserError(f"{root}: {what}; give the folder that task=collect wrote, or that holds meta/, data/, videos/")


def _conversion(version: str) -> str:
    if version == "v2.1":
        return f"Convert it with the package lerobot: {_CONVERTER}"
    if version < "v2.1":
        return (
            "Convert it with the package lerobot, first to v2.1 with an older release "
            f"(lerobot.datasets.v21.convert_dataset_v20_to_v21), then with {_CONVERTER}"
        )
    return "Use a newer release of this package."


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*/[!.]*.parquet"))


def _resized(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Stretched, and without aliasing where it becomes smaller."""
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BICUBIC))
