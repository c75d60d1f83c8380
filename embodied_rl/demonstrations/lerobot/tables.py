"""Reads the tables and ``info.json`` of a LeRobot v3.0 data set, whoever wrote it, with clear messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embodied_rl.demonstrations.lerobot import layout
from embodied_rl.demonstrations.lerobot.episode import STAGING
from embodied_rl.errors import UserError, first_line, suggestion


def info(root: Path) -> dict[str, Any]:
    """``meta/info.json``.

    Raises:
        UserError: no data set, one of another version, or a damaged one.
    """
    path = root / layout.INFO
    if not path.is_file():
        if (root / STAGING).is_dir():
            raise UserError(
                f"{root}: the collection is not finished; repeat its task=collect command, which goes on where it was, "
                "or with a smaller collect.episodes_per_task for what there is"
            )
        what = "not a LeRobot data set: it has no meta/info.json" if root.is_dir() else "no such folder"
        raise UserError(f"{root}: {what}; give the folder that task=collect wrote, or that holds meta/, data/, videos/")
    try:
        content = json.loads(path.read_text())
        version = str(content["codebase_version"])
        missing = {"fps", "features", "data_path", "total_episodes", "total_frames"} - set(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error
    if not version.startswith("v3."):
        raise UserError(f"{root}: LeRobot format {version}, expected {layout.VERSION}. {_conversion(version)}")
    if missing:
        raise damaged(path, f"no {', '.join(sorted(missing))}")
    return content


def _conversion(version: str) -> str:
    if version == "v2.1":
        return (
            "Convert it with the package lerobot: "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=<name>"
        )
    if version < "v2.1":
        return (
            "Convert it with the package lerobot, first to v2.1 with an older release "
            "(lerobot.datasets.v21.convert_dataset_v20_to_v21), then with "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=<name>"
        )
    return "Use a newer release of this package."


def damaged(path: Path, why: object) -> UserError:
    """The error for a file that is not as ``info.json`` says."""
    return UserError(f"{path}: cannot be read ({first_line(why)}); the data set is damaged: copy it anew")


def feature(root: Path, content: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """The description of one feature in ``info.json``.

    Args:
        what: what it is needed as, for the message.

    Raises:
        UserError: there is none of this name.
    """
    features = content["features"]
    if name not in features:
        raise UserError(
            f"{root}: has no feature {name!r} for {what}, only {', '.join(features)}.{suggestion(name, features)}"
        )
    return features[name]


def episodes(root: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """A record for each of the ``total_episodes`` episodes, in order."""
    rows = _read(root, "meta/episodes", None).to_pylist()
    rows = sorted(rows, key=lambda row: row["episode_index"])[: content["total_episodes"]]
    if [row["episode_index"] for row in rows] != list(range(content["total_episodes"])):
        raise damaged(root / "meta/episodes", f"{len(rows)} of {content['total_episodes']} episodes are there")
    return rows


def column(root: Path, content: dict[str, Any], name: str) -> NDArray[Any]:
    """[F] or [F,D]: one feature of all frames, in order."""
    table = _read(root, "data", [name])
    if len(table) < content["total_frames"]:
        raise damaged(root / "data", f"{len(table)} of {content['total_frames']} frames are there")
    values = table.column(name).slice(0, content["total_frames"]).combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0)
    if pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        flat = values.flatten().to_numpy(zero_copy_only=False)
        if len(flat) % max(len(values), 1):
            raise damaged(root / "data", f"{name} has rows of different lengths")
        return flat.reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False)


def tasks(root: Path) -> list[str]:
    """The instructions, by ``task_index``."""
    table = _read(root, layout.TASKS, None)
    texts = [name for name in table.schema.names if pa.types.is_string(table.schema.field(name).type)
             or pa.types.is_large_string(table.schema.field(name).type)]  # fmt: skip
    if not texts or "task_index" not in table.schema.names:
        raise damaged(
            root / layout.TASKS, f"got columns {', '.join(table.schema.names)}, expected task_index and a text"
        )
    pairs = zip(table.column("task_index").to_pylist(), table.column(texts[0]).to_pylist(), strict=True)
    by_index = dict(pairs)
    if sorted(by_index) != list(range(len(by_index))):
        raise damaged(root / layout.TASKS, f"got task_index {sorted(by_index)}")
    return [by_index[index] for index in range(len(by_index))]


def _read(root: Path, where: str, columns: list[str] | None) -> pa.Table:
    """A parquet file, or all those of a folder, in the order of their names."""
    path = root / where
    files = [path] if path.suffix else sorted(path.glob("[!.]*/[!.]*.parquet"))
    if not files:
        raise damaged(path, "no parquet file")
    parts = []
    for file in files:
        try:
            parts.append(pq.ParquetFile(file).read(columns=columns))
        except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors derive from these
            raise damaged(file, error) from error
    return pa.concat_tables(parts, promote_options="permissive")
