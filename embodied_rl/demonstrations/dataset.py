"""Recorded episodes as training sees them: any frames at once, each with the chunk of actions that follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.demonstrations.lerobot.reader import DataSet, ReportProgress, damaged
from embodied_rl.errors import UserError, suggestion


class Demonstrations:
    """A LeRobot v3.0 data set, open for training. The first time, its videos are decoded (see ``lerobot/reader.py``).

    Args:
        path: the data set's folder.
        chunk: C, the actions that follow a frame.
        cameras: the policy's camera -> the data set's feature, as ``{"agentview": "observation.images.image"}``. None:
            all cameras, under their own names.
        successes_only: leave out episodes that the data set marks as failures.
        report: told how far the decoding is, as (what, done, total).

    Raises:
        UserError: no data set, one of another version, damaged, or without a feature that is needed.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        chunk: int,
        cameras: Mapping[str, str] | None = None,
        successes_only: bool = True,
        report: ReportProgress = lambda what, done, total: None,
    ) -> None:
        root = Path(path)
        source = DataSet.open(root)
        if not source.info["total_episodes"]:
            raise UserError(f"{root}: the data set has no episodes; collect or copy some first")
        keys = _camera_features(source, cameras)
        source.require(metadata.STATE, "the state")
        source.require(metadata.ACTION, "the actions")
        records = source.episodes()
        used = [e for e in records if not successes_only or e.get("success", True) is not False]
        if not used:
            raise UserError(f"{root}: all its {len(records)} episodes failed, so there is nothing to imitate")
        self._chunk = chunk
        self._state, self._actions = _rows(source, metadata.STATE), _rows(source, metadata.ACTION)
        self._tasks, self._task_index = source.tasks(), source.column("task_index")
        self._episode = np.repeat([e["episode_index"] for e in used], [e["length"] for e in used])
        self._frames = np.concatenate([np.arange(e["dataset_from_index"], e["dataset_to_index"]) for e in used])
        self._ends = np.repeat([e["dataset_to_index"] for e in used], [e["length"] for e in used])
        self._images = source.frames(list(keys.values()), report)
        self._keys = keys

        self.num_episodes = len(used)
        self.num_frames = len(self._frames)
        self.cameras: Mapping[str, tuple[int, int]] = {
            camera: (self._images[key].shape[1], self._images[key].shape[2]) for camera, key in keys.items()
        }
        """Camera -> (height, width)."""
        self.state_dim, self.action_dim = self._state.shape[1], self._actions.shape[1]
        found = metadata.number_statistics(self._actions[self._frames].numpy())
        self.action_statistics: Mapping[str, list[float]] = {
            name: found[name] for name in ("min", "max", "mean", "std", "q01", "q99")
        }
        """Statistics of each action dimension, over all frames; std is divided by their number."""

    def __len__(self) -> int:
        return self.num_frames

    def sample(self, frames: Sequence[int] | Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        """Observations and actions at N of the ``num_frames`` frames, which are in the order of episodes and time.

        Returns:
            The observations (``env_ids`` are the episodes' numbers); the next C actions [N,C,A] float32, the last one
            repeated beyond the episode's end; and valid [N,C] bool, False beyond it.
        """
        chosen = np.asarray(frames, dtype=np.int64)
        rows = self._frames[chosen]
        steps = rows[:, None] + np.arange(self._chunk)
        ends = self._ends[chosen][:, None]
        obs = EnvObs(
            env_ids=torch.from_numpy(self._episode[chosen].astype(np.int64)),
            images={
                camera: torch.from_numpy(np.asarray(self._images[key][rows])) for camera, key in self._keys.items()
            },
            state=self._state[rows],
            instructions=tuple(self._tasks[index] for index in self._task_index[rows]),
        )
        return obs, self._actions[np.minimum(steps, ends - 1)], torch.from_numpy(steps < ends)


def _camera_features(source: DataSet, cameras: Mapping[str, str] | None) -> dict[str, str]:
    """Camera -> feature of the data set."""
    images = [name for name, feature in source.info["features"].items() if feature["dtype"] in ("video", "image")]
    if cameras is None:
        return {name.removeprefix(metadata.IMAGES): name for name in images}
    for camera, name in cameras.items():
        if name not in images:
            raise UserError(
                f"{source.root}: has no images {name!r} for the camera {camera!r}, only "
                f"{', '.join(images) or 'none at all'}.{suggestion(name, images)}"
            )
    return dict(cameras)


def _rows(source: DataSet, name: str) -> Tensor:
    """[F,D] float32: a feature of all frames."""
    values = source.column(name)
    rows = torch.from_numpy(values.astype(np.float32).reshape(len(values), -1))
    if not torch.isfinite(rows).all():
        raise damaged(source.root / "data", f"{name} has numbers that are NaN or infinite")
    return rows
