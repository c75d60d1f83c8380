"""Recorded episodes as training sees them: any frames at once, each with the chunk of actions that follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.demonstrations.lerobot import layout, statistics, tables
from embodied_rl.demonstrations.lerobot.frames import ReportProgress, open_frames
from embodied_rl.errors import UserError, suggestion


class Demonstrations:
    """A LeRobot v3.0 data set, open for training. The first time, its videos are decoded (see ``lerobot/frames.py``).

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
        info = tables.info(root)
        if not info["total_episodes"]:
            raise UserError(f"{root}: the data set has no episodes; collect or copy some first")
        keys = _camera_features(root, info, cameras)
        for name, what in ((layout.STATE, "the state"), (layout.ACTION, "the actions")):
            tables.feature(root, info, name, what)
        records = tables.episodes(root, info)
        used = [e for e in records if not successes_only or e.get("success", True) is not False]
        if not used:
            raise UserError(f"{root}: all its {len(records)} episodes failed, so there is nothing to imitate")
        self._chunk = chunk
        self._state = _rows(tables.column(root, info, layout.STATE))
        self._actions = _rows(tables.column(root, info, layout.ACTION))
        for name, rows in ((layout.STATE, self._state), (layout.ACTION, self._actions)):
            if not torch.isfinite(rows).all():
                raise tables.damaged(root / "data", f"{name} has numbers that are NaN or infinite")
        self._tasks = tables.tasks(root)
        self._task_index = tables.column(root, info, "task_index")
        self._episode = np.repeat([e["episode_index"] for e in used], [e["length"] for e in used])
        self._frames = np.concatenate([np.arange(e["dataset_from_index"], e["dataset_to_index"]) for e in used])
        self._ends = np.repeat([e["dataset_to_index"] for e in used], [e["length"] for e in used])
        self._images = open_frames(root, info, records, list(keys.values()), report)
        self._keys = keys

        self.num_episodes = len(used)
        self.num_frames = len(self._frames)
        self.cameras: Mapping[str, tuple[int, int]] = {
            camera: (self._images[key].shape[1], self._images[key].shape[2]) for camera, key in keys.items()
        }
        """Camera -> (height, width)."""
        self.state_dim, self.action_dim = self._state.shape[1], self._actions.shape[1]
        found = statistics.of_numbers(self._actions[self._frames].numpy())
        self.action_statistics: Mapping[str, list[float]] = {
            name: found[name] for name in ("min", "max", "mean", "std", "q01", "q99")
        }
        """Of each action dimension, over all frames; std is divided by their number."""

    def __len__(self) -> int:
        return self.num_frames

    def sample(self, frames: Sequence[int] | Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        """What was seen and done at N of the ``num_frames`` frames, which are in the order of episodes and time.

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


def _camera_features(root: Path, info: Mapping[str, Any], cameras: Mapping[str, str] | None) -> dict[str, str]:
    """Camera -> feature of the data set."""
    images = [name for name, feature in info["features"].items() if feature["dtype"] in ("video", "image")]
    if cameras is None:
        return {name.removeprefix(layout.IMAGES): name for name in images}
    for camera, name in cameras.items():
        if name not in images:
            raise UserError(
                f"{root}: has no images {name!r} for the camera {camera!r}, only {', '.join(images) or 'none at all'}."
                f"{suggestion(name, images)}"
            )
    return dict(cameras)


def _rows(values: NDArray[Any]) -> Tensor:
    """[F,D] float32."""
    return torch.from_numpy(values.astype(np.float32).reshape(len(values), -1))
