"""Finished episodes on disk, each in a folder of its own, until the writer puts them into the data set's files.

A folder with an episode's name is whole, whenever the process was killed. Workers write theirs side by side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.demonstrations.lerobot import metadata, video
from embodied_rl.files import atomic, write_json

STAGING: Final = ".staging"
_FACTS, _STEPS = "episode.json", "steps.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """Facts of an episode that training may want, beside its steps."""

    task_id: int
    demonstration: int
    """Number of the task's demonstration that it is, or tried to be."""
    attempt: int
    """Number of attempts at it that came before."""
    reset_state_id: int
    """The initial state, in the env's numbering."""
    instruction: str
    success: bool
    length: int
    """Steps."""

    @property
    def name(self) -> str:
        """Sorts by task, demonstration and attempt."""
        outcome = "success" if self.success else "failure"
        return f"task{self.task_id:04d}_demonstration{self.demonstration:06d}_attempt{self.attempt:03d}_{outcome}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """An episode's T steps: the observation before each, the action, and its outcome."""

    images: Mapping[str, NDArray[np.uint8]]
    """Camera -> [T,H,W,3]."""
    state: NDArray[np.float32]
    """[T,S]."""
    actions: NDArray[np.float32]
    """[T,A]."""
    rewards: NDArray[np.float32]
    """[T], the simulator's reward level after the step."""
    success: NDArray[np.bool_]
    """[T], the goal holds after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEpisode:
    """An episode in the staging folder."""

    folder: Path
    facts: EpisodeFacts
    kept: bool
    """It has its steps; False: only the fact that it was played is remembered."""

    def steps(self) -> dict[str, NDArray[Any]]:
        """``state``, ``actions``, ``rewards`` and ``success``, as in :class:`Steps`."""
        with np.load(self.folder / _STEPS) as stored:
            return {name: stored[name] for name in ("state", "actions", "rewards", "success")}

    def histogram(self, camera: str) -> NDArray[np.int64]:
        """[3,256] of the camera's images."""
        with np.load(self.folder / _STEPS) as stored:
            return stored[f"histogram/{camera}"]

    def video(self, camera: str) -> Path:
        return self.folder / f"{camera}.mp4"

    def images(self, camera: str) -> NDArray[np.uint8]:
        """[T,H,W,3], where they are not stored as video."""
        return np.load(self.folder / f"{camera}.npy")


def stage(root: Path, facts: EpisodeFacts, steps: Steps | None, *, fps: float, videos: bool) -> None:
    """Write an episode to the staging folder of the data set ``root``.

    Args:
        steps: None remembers only that the episode was played.
        videos: encode the images now; False: keep them as they are.
    """
    folder = root / STAGING / facts.name
    with atomic(folder) as scratch:
        scratch.mkdir()
        if steps is not None:
            arrays: dict[str, Any] = {
                "state": steps.state,
                "actions": steps.actions,
                "rewards": steps.rewards,
                "success": steps.success,
            }
            arrays |= {f"histogram/{camera}": metadata.histogram(images) for camera, images in steps.images.items()}
            np.savez(scratch / _STEPS, **arrays)
            for camera, images in steps.images.items():
                if videos:
                    video.encode(scratch / f"{camera}.mp4", images, fps)
                else:
                    np.save(scratch / f"{camera}.npy", images)
        write_json(scratch / _FACTS, asdict(facts) | {"kept": steps is not None})


def staged(root: Path) -> list[StagedEpisode]:
    """The whole episodes in the staging folder, in the order of their names."""
    found = []
    for path in sorted((root / STAGING).glob(f"[!.]*/{_FACTS}")):
        content = json.loads(path.read_text())
        kept = content.pop("kept")
        found.append(StagedEpisode(folder=path.parent, facts=EpisodeFacts(**content), kept=kept))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Numbers of episodes in a staging folder."""

    successes: int
    failures: int


def count_staged(root: Path) -> Count:
    """Quick: nothing is opened."""
    names = [path.name for path in (root / STAGING).glob("[!.]*")]
    successes = sum(name.endswith("success") for name in names)
    return Count(successes=successes, failures=len(names) - successes)
