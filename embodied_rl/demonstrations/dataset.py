"""Recorded episodes as training sees them: any frames at once, each with the chunk of actions that follows it.

Also which frames a training step takes, and the trajectory. Each is a function of seed, step and a sample's position in
the step's batch: any number of workers gives the same, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import EnvObs, Trajectory
from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.demonstrations.lerobot.reader import DataSet, ReportProgress
from embodied_rl.errors import UserError, suggestion
from embodied_rl.seeding import derived_seed, generator

if TYPE_CHECKING:
    from embodied_rl.models.base import PolicySpec


class Demonstrations:
    """A LeRobot v3.0 data set, open for training. The first time, its videos are decoded (see ``lerobot/reader.py``).

    Args:
        path: the data set's folder.
        chunk: C, the actions that follow a frame.
        cameras: the policy's camera -> the data set's feature, as ``{"agentview": "observation.images.image"}``. None:
            all cameras, under their own names.
        sizes: the policy's camera -> (height, width) that its pictures are stretched to; the others stay as recorded.
        state: False: the policy sees none, and the data set need have none.
        clip_actions: cut actions off at -1 and 1.
        successes_only: leave out episodes that the data set marks as failures.
        report: told how far the decoding is, as (what, done, total).

    Raises:
        UserError: no data set, one of another version, damaged, without a feature that is needed, or without a frame
            that is not disturbed.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        chunk: int,
        cameras: Mapping[str, str] | None = None,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        state: bool = True,
        clip_actions: bool = False,
        successes_only: bool = True,
        report: ReportProgress = lambda what, done, total: None,
    ) -> None:
        root = Path(path)
        source = DataSet.open(root)
        keys = _camera_features(source, cameras)
        if state:
            source.require(metadata.STATE, "the state")
        source.require(metadata.ACTION, "the actions")
        used = source.used_episodes(successes_only=successes_only)
        self._chunk = chunk
        self._actions = torch.from_numpy(source.rows(metadata.ACTION))
        self._state = torch.from_numpy(source.rows(metadata.STATE)) if state else self._actions[:, :0]
        if clip_actions:
            self._actions = self._actions.clamp(-1.0, 1.0)
        self._tasks, self._task_index = source.tasks(), source.column("task_index")
        self._episode = np.repeat([e["episode_index"] for e in used], [e["length"] for e in used])
        self._frames = np.concatenate([np.arange(e["dataset_from_index"], e["dataset_to_index"]) for e in used])
        self._ends = np.repeat([e["dataset_to_index"] for e in used], [e["length"] for e in used])
        if metadata.DISTURBED in source.info["features"]:
            self._leave_out(root, source.column(metadata.DISTURBED).astype(np.bool_))
        wanted = {key: (sizes or {}).get(camera, source.image_size(key)) for camera, key in keys.items()}
        self._images = source.frames(wanted, report)
        self._keys = keys

        self.num_episodes = len(np.unique(self._episode))
        self.num_frames = len(self._frames)
        self.cameras: Mapping[str, tuple[int, int]] = {
            camera: (self._images[key].shape[1], self._images[key].shape[2]) for camera, key in keys.items()
        }
        """Camera -> (height, width)."""
        self.state_dim, self.action_dim = self._state.shape[1], self._actions.shape[1]
        self.action_statistics: Mapping[str, list[float]] = _statistics(self.actions)
        """Statistics of each action dimension, over all frames; std is divided by their number."""

    @classmethod
    def of_policy(
        cls,
        path: Path | str,
        spec: PolicySpec,
        *,
        cameras: Mapping[str, str] | None,
        clip_actions: bool,
        report: ReportProgress,
    ) -> Self:
        """As a policy of ``spec`` reads them. Choices are never cut off."""
        return cls(
            path,
            chunk=spec.num_action_chunks,
            cameras=cameras,
            sizes=spec.image_shapes,
            state=spec.state_dim > 0,
            clip_actions=clip_actions and not spec.action_choices,
            report=report,
        )

    @property
    def actions(self) -> NDArray[np.float32]:
        """[num_frames,A]."""
        return self._actions[self._frames].numpy()

    @property
    def rows(self) -> NDArray[np.int64]:
        """[num_frames]: the data set's frames that these are."""
        return self._frames

    @property
    def first_frames(self) -> NDArray[np.int64]:
        """[num_episodes]: the frame with which each episode begins."""
        return np.flatnonzero(np.diff(self._episode, prepend=-1))

    def __len__(self) -> int:
        return self.num_frames

    def _leave_out(self, root: Path, disturbed: NDArray[np.bool_]) -> None:
        """Let no chunk begin at ``disturbed`` frames, or go on beyond one.

        Args:
            disturbed: [all frames of the data set].
        """
        first = np.append(np.flatnonzero(disturbed), len(disturbed))
        ends = np.minimum(self._ends, first[np.searchsorted(first, self._frames)])
        kept = ends > self._frames
        if not kept.any():
            raise UserError(
                f"{root}: all {len(kept)} frames are disturbed, so there is nothing to imitate; leave more steps "
                "between bursts (the second number of collect.noise_bursts)"
            )
        self._episode, self._frames, self._ends = self._episode[kept], self._frames[kept], ends[kept]

    def sample(self, frames: Sequence[int] | Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        """Observations and actions at N of the ``num_frames`` frames, which are in the order of episodes and time.
        Disturbed ones are not among them.

        Returns:
            The observations (``env_ids`` are the episodes' numbers); the next C actions [N,C,A] float32, the last one
            repeated beyond the end, the episode's or the first disturbed frame; and valid [N,C] bool, False beyond it.
        """
        chosen = np.asarray(frames, dtype=np.int64)
        rows = self._frames[chosen]
        actions, valid = self.chunks(chosen)
        obs = EnvObs(
            env_ids=torch.from_numpy(self._episode[chosen].astype(np.int64)),
            images={
                camera: torch.from_numpy(np.asarray(self._images[key][rows])) for camera, key in self._keys.items()
            },
            state=self._state[rows],
            instructions=tuple(self._tasks[index] for index in self._task_index[rows]),
        )
        return obs, actions, valid

    def chunks(self, frames: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The actions and what of them is valid, as of :meth:`sample`."""
        steps = self._frames[frames][:, None] + np.arange(self._chunk)
        ends = self._ends[frames][:, None]
        return self._actions[np.minimum(steps, ends - 1)], torch.from_numpy(steps < ends)


class Aggregate:
    """Several data sets as one: the frames of the first, then those of the second, and so on.

    Raises:
        UserError: their states, actions or pictures differ in shape.
    """

    def __init__(self, parts: Sequence[Demonstrations]) -> None:
        shapes = [(part.state_dim, part.action_dim, dict(part.cameras)) for part in parts]
        if differing := [shape for shape in shapes if shape != shapes[0]]:
            raise UserError(
                f"data.path: the data sets differ in (state, actions, cameras): {shapes[0]} and {differing[0]}; take "
                "together only what was recorded alike, or stretch pictures with data.resize=true"
            )
        self._parts = parts
        self._starts = np.cumsum([0, *(part.num_frames for part in parts)])
        self.num_frames, self.num_episodes = int(self._starts[-1]), sum(part.num_episodes for part in parts)

    def __len__(self) -> int:
        return self.num_frames

    @property
    def action_statistics(self) -> Mapping[str, list[float]]:
        """As a single data set's."""
        return _statistics(np.concatenate([part.actions for part in self._parts]))

    def sample(self, frames: Sequence[int] | Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        """As a single data set's; ``env_ids`` are the episodes' numbers in their own."""
        chosen = np.asarray(frames, dtype=np.int64)
        owners = np.searchsorted(self._starts, chosen, side="right") - 1
        places, found = [], []
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            places.append(mine)
            found.append(self._parts[owner].sample(chosen[mine] - self._starts[owner]))
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        words = [word for obs, _, _ in found for word in obs.instructions]
        obs = EnvObs(
            env_ids=torch.cat([obs.env_ids for obs, _, _ in found])[order],
            images={
                camera: torch.cat([obs.images[camera] for obs, _, _ in found])[order] for camera in found[0][0].images
            },
            state=torch.cat([obs.state for obs, _, _ in found])[order],
            instructions=tuple(words[index] for index in order.tolist()),
        )
        return obs, torch.cat([a for _, a, _ in found])[order], torch.cat([v for _, _, v in found])[order]


def together(parts: Sequence[Demonstrations]) -> Demonstrations | Aggregate:
    """One or more data sets as one.

    Raises:
        UserError: as :class:`Aggregate`.
    """
    return parts[0] if len(parts) == 1 else Aggregate(parts)


def _statistics(actions: NDArray[np.float32]) -> dict[str, list[float]]:
    """Of [F,A] actions, dimension by dimension; std is divided by their number."""
    found = metadata.number_statistics(actions)
    return {name: found[name] for name in ("min", "max", "mean", "std", "q01", "q99")}


def _camera_features(source: DataSet, cameras: Mapping[str, str] | None) -> dict[str, str]:
    """Camera -> feature of the data set."""
    images = source.image_features()
    if cameras is None:
        return {name.removeprefix(metadata.IMAGES): name for name in images}
    for camera, name in cameras.items():
        if name not in images:
            raise UserError(
                f"{source.root}: has no images {name!r} for the camera {camera!r}, only "
                f"{', '.join(images) or 'none at all'}.{suggestion(name, images)}"
            )
    return dict(cameras)


def frames_of_step(num_frames: int, *, seed: int, step: int, batch_size: int) -> Tensor:
    """[batch_size] int64: the frames of a training step.

    Passes over the data set follow each other without a gap, each in an order of its own, and every pass has each frame
    once.
    """
    drawn = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = drawn // num_frames
    frames = np.empty_like(drawn)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        frames[inside] = _order(num_frames, seed, int(epoch))[drawn[inside] % num_frames]
    return torch.from_numpy(frames)


def mixed_frames_of_step(num_frames: Sequence[int], shares: Sequence[int], *, seed: int, step: int) -> Tensor:
    """[sum(shares)] int64: the frames of a training step that takes ``shares`` of sets of ``num_frames``, which follow
    each other as in an :class:`Aggregate`. Each set has passes of its own; a step's frames are shuffled."""
    starts = np.cumsum([0, *num_frames])
    parts = [
        start + frames_of_step(size, seed=derived_seed(seed, number), step=step, batch_size=share)
        for number, (start, size, share) in enumerate(zip(starts, num_frames, shares, strict=False))
    ]
    frames = torch.cat(parts)
    return frames[torch.from_numpy(generator(seed, step, len(frames)).permutation(len(frames)))]


@lru_cache(maxsize=32)  # of several sets, the passes under way
def _order(num_frames: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return generator(seed, epoch).permutation(num_frames)


def demonstration_trajectory(
    *, positions: Tensor, replay_inputs: Mapping[str, Tensor], valid: Tensor, action_dim: int, policy_version: int
) -> Trajectory:
    """T=1: N chunks, each a group of its own, without rewards.

    Args:
        positions: [N] int64, in the training step's batch.
        replay_inputs: each [N,...].
        valid: [N,C] bool: the steps before the episode's end.
    """
    n, c = valid.shape
    no_end = torch.zeros(1, n, c, dtype=torch.bool)
    return Trajectory(
        env_ids=positions,
        group_ids=positions,
        rollout_epoch=0,
        rewards=torch.zeros(1, n, c),
        scores=torch.zeros(n),
        terminated=no_end,
        truncated=no_end,
        valid=valid[None],
        logprobs=torch.zeros(1, n, c, action_dim),
        values=None,
        bootstrap_values=None,
        replay_inputs={key: tensor[None] for key, tensor in replay_inputs.items()},
        policy_versions=torch.full((1, n), policy_version),
    )
