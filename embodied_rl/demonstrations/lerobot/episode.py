"""Finished episodes on disk, each in a folder of its own, until the writer puts them into the data set's files.

A folder with an episode's name is whole, whenever the process was killed. Workers write theirs side by side. Its images
are MP4 files that can be joined without encoding again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from embodied_rl.demonstrations.lerobot import metadata
from embodied_rl.errors import UserError
from embodied_rl.evaluation.video import write_h264
from embodied_rl.files import atomic, parse_json, write_json

STAGING: Final = ".staging"
_FACTS, _STEPS = "episode.json", "steps.npz"
_ENCODER = {"crf": "10", "preset": "medium", "g": "10", "bf": "0", "mbtree": "0"}
"""Nearly without loss; a key frame every 10 frames, so that single frames are found quickly; no frame refers to a later
one, so that the order of storage is that of time and files can be joined; no macroblock tree, whose lookahead makes
other files of the same small images now and then (one of 100 at 16x16 pixels, one of 1,000 at 48x48)."""


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
    """Steps that are recorded."""

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
    disturbed: NDArray[np.bool_] | None = None
    """[T], something else than the action was executed, which nothing foretold; None: this is not recorded."""
    start_level: float = 0.0
    """The simulator's reward level before the first step."""
    terminated: bool = False
    """The simulator ended the episode with the last step, whether the goal held or not: nothing follows."""

    def since(self, first: int) -> Steps | None:
        """The steps from number ``first`` on; None where there are none."""
        if first >= len(self.success):
            return None
        return Steps(
            images={camera: frames[first:] for camera, frames in self.images.items()},
            state=self.state[first:],
            actions=self.actions[first:],
            rewards=self.rewards[first:],
            success=self.success[first:],
            disturbed=None if self.disturbed is None else self.disturbed[first:],
            start_level=float(self.rewards[first - 1]) if first else self.start_level,
            terminated=self.terminated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEpisode:
    """An episode in the staging folder."""

    folder: Path
    facts: EpisodeFacts
    kept: bool
    """It has its steps; False: only the fact that it was played is remembered."""

    def steps(self) -> dict[str, NDArray[Any]]:
        """``state``, ``actions``, ``rewards``, ``success`` and, if it is recorded, ``disturbed``, as in
        :class:`Steps`."""
        names = ("state", "actions", "rewards", "success", "disturbed")
        with np.load(self.folder / _STEPS) as stored:
            return {name: stored[name] for name in names if name in stored}

    def fact(self, name: str) -> float | bool | None:
        """``start_level`` or ``terminated``, as in :class:`Steps`; None: an earlier version staged it, and nobody
        knows."""
        with np.load(self.folder / _STEPS) as stored:
            return stored[name].item() if name in stored else None

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
                "start_level": float(steps.start_level),
                "terminated": steps.terminated,
            }
            if steps.disturbed is not None:
                arrays["disturbed"] = steps.disturbed
            arrays |= {f"histogram/{camera}": metadata.histogram(images) for camera, images in steps.images.items()}
            np.savez(scratch / _STEPS, **arrays)
            for camera, images in steps.images.items():
                if videos:
                    encode_video(scratch / f"{camera}.mp4", images, fps)
                else:
                    np.save(scratch / f"{camera}.npy", images)
        write_json(scratch / _FACTS, asdict(facts) | {"kept": steps is not None})


def staged(root: Path) -> list[StagedEpisode]:
    """The whole episodes in the staging folder, in the order of their names."""
    found = []
    for path in sorted((root / STAGING).glob(f"[!.]*/{_FACTS}")):
        content = parse_json(path.read_text())
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


def encode_video(path: Path, images: NDArray[np.uint8], fps: float) -> None:
    """Write ``images`` [T,H,W,3] as H.264, yuv420p.

    Raises:
        UserError: an odd height or width, which yuv420p cannot have.
    """
    height, width = images.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(
            f"images of {height}x{width} pixels cannot become a video, which needs even sides; use "
            "collect.image_format=png, or other image sizes in env.init_params"
        )
    write_h264(path, images, fps, _ENCODER, threads=1)  # equal images give equal files, and workers share the cores


def join_videos(path: Path, parts: Iterable[Path], fps: float) -> None:
    """Put videos that :func:`encode_video` wrote, all of one size, one behind the other."""
    with av.open(str(path), "w", format="mp4") as target:
        stream, done = None, 0
        for part in parts:
            with av.open(str(part)) as source:
                video = source.streams.video[0]
                if stream is None:
                    stream = target.add_stream_from_template(video)
                assert video.time_base is not None  # an MP4 file has one
                ticks = 1 / (Fraction(fps).limit_denominator(1001) * video.time_base)
                for packet in source.demux(video):
                    if packet.size == 0:  # marks the end
                        continue
                    packet.pts = packet.dts = round(done * ticks)
                    packet.duration = round(ticks)
                    packet.stream = stream
                    target.mux(packet)
                    done += 1


def decode_video(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Each frame as (seconds since the file's start, [H,W,3] RGB), in the order of time.

    Raises:
        UserError: no video, or a damaged one.
    """
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                yield float(frame.time or 0.0), np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)
    except (FFmpegError, IndexError, OSError) as error:
        raise UserError(f"{path}: not a readable video ({error}); the data set is damaged: copy it anew") from error
