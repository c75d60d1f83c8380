"""Records the frames of some envs and writes them as one video, a tile each."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodied_rl.evaluation.success import task_name
from embodied_rl.evaluation.tiles import Grid, TileStyle, arrange, canvas, fit
from embodied_rl.files import atomic

if TYPE_CHECKING:  # contracts import torch; data sets are checked without it
    from embodied_rl.contracts import EpisodeRecord

MIN_TILE_SIZE = 96
"""Below this a caption does not fit."""
MAX_TILES = 16
"""Of a video where nobody chose its envs: an overview."""
_SPOOL_BYTES = 64 * 2**20
_JPEG = {"quality": 92, "subsampling": 0}
ENCODER = {"crf": "20", "preset": "veryfast"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """One frame of one env; its JPEG lies in the spool."""

    offset: int
    size: int
    instruction: str
    step: int
    reward: float
    reward_sum: float
    success: bool
    """At this step or before it in the same episode."""


class VideoRecorder:
    """Collects frames with :meth:`record`, writes them with :meth:`finish` and is then ready for the next video.

    Memory stays bounded however long the episodes are: a frame is kept as a JPEG of at most the tile's size, the first
    64 MiB of them in memory, the rest in an unnamed temporary file. While encoding, one picture is in memory.

    Args:
        fps: the simulator's control frequency, so that the video plays in real time.
        group_size: env ``i`` belongs to GRPO group ``i // group_size``; members stand side by side in a coloured frame.
        tile_size: width of a tile in pixels. Its height follows from the first frame's aspect ratio.
        info_on_video: a caption under each image: instruction, step, reward, success.
        max_tiles: frames of further envs are ignored; whole groups are kept as far as they fit.
        only: the envs to record; None: all.
    """

    def __init__(
        self,
        *,
        fps: float,
        group_size: int = 1,
        tile_size: int = 256,
        info_on_video: bool = True,
        max_tiles: int = MAX_TILES,
        only: Collection[int] | None = None,
    ) -> None:
        for name, value, least in (("group_size", group_size, 1), ("tile_size", tile_size, MIN_TILE_SIZE),
                                   ("max_tiles", max_tiles, 1)):  # fmt: skip
            if value < least:
                raise ValueError(f"VideoRecorder: got {name}={value}, expected at least {least}")
        if not fps > 0:
            raise ValueError(f"VideoRecorder: got fps={fps}, expected a positive number of frames per second")
        self.fps, self.group_size, self.tile_size = fps, group_size, tile_size
        self.info_on_video, self.max_tiles = info_on_video, max_tiles
        self._only = only
        self._clear()

    def _clear(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - closed by clear
        self._end = 0
        self._moments: dict[int, list[_Moment]] = {}
        self._image_size: tuple[int, int] | None = None

    def record(
        self,
        env_index: int,
        frame: NDArray[np.uint8],
        *,
        instruction: str,
        episode_step: int,
        reward: float,
        success: bool,
    ) -> None:
        """Append one frame to an env's tile.

        The envs' frames may arrive in any interleaving, one env's in the order of time. An ``episode_step`` that is not
        larger than the last one starts a new episode in the same tile.

        Args:
            frame: [H,W,3] uint8, upright RGB. Not kept.
            success: the goal holds now.
        """
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise ValueError(
                f"VideoRecorder.record: got a frame of shape {list(frame.shape)} {frame.dtype}, expected [H,W,3] uint8"
            )
        moments = self._moments.get(env_index)
        if moments is None:
            if not self.wants(env_index):
                return
            moments = self._moments[env_index] = []
        if self._image_size is None:
            self._image_size = (self.tile_size, max(round(self.tile_size * frame.shape[0] / frame.shape[1]), 1))
        last = moments[-1] if moments and episode_step > moments[-1].step else None
        offset, size = self._store(frame, self._image_size)
        moments.append(
            _Moment(
                offset=offset,
                size=size,
                instruction=instruction,
                step=episode_step,
                reward=float(reward),
                reward_sum=float(reward) + (last.reward_sum if last else 0.0),
                success=bool(success) or (last is not None and last.success),
            )
        )

    def wants(self, env_index: int) -> bool:
        """Whether the env has a tile, or may get one."""
        if env_index in self._moments:
            return True
        if self._only is not None and env_index not in self._only:
            return False
        groups = {index // self.group_size for index in self._moments} | {env_index // self.group_size}
        return len(self._moments) < self.max_tiles and (
            len(groups) == 1 or len(groups) * self.group_size <= self.max_tiles
        )

    def _store(self, frame: NDArray[np.uint8], image_size: tuple[int, int]) -> tuple[int, int]:
        image = Image.fromarray(np.ascontiguousarray(frame))
        if image.width > image_size[0] or image.height > image_size[1]:
            image = fit(image, image_size)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", **_JPEG)
        offset = self._end
        self._spool.seek(offset)
        self._spool.write(buffer.getbuffer())
        self._end += buffer.tell()
        return offset, buffer.tell()

    def _load(self, moment: _Moment) -> Image.Image:
        self._spool.seek(moment.offset)
        return Image.open(io.BytesIO(self._spool.read(moment.size))).convert("RGB")

    def tiles(self, envs: Collection[int] | None = None) -> dict[int, int]:
        """Env index -> its tile's number in a video of ``envs`` (None: all), in the order in which tiles stand; envs
        that have none are left out."""
        shown = sorted(env for env in self._moments if envs is None or env in envs)
        return {env_index: number for number, env_index in enumerate(shown)}

    def boxes(self, envs: Collection[int] | None = None) -> dict[int, tuple[int, int, int, int]]:
        """As :meth:`tiles`: each tile's (left, top, right, bottom) in the pictures of that video."""
        shown = {env_index: self._moments[env_index] for env_index in self.tiles(envs)}
        return self._layout(shown)[1].tiles if shown else {}

    def finish(self, path: Path | str) -> Path | None:
        """Write everything, as :meth:`write` does, and forget it."""
        try:
            return self.write(path)
        finally:
            self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._spool.close()
        self._clear()

    def write(self, path: Path | str, envs: Collection[int] | None = None) -> Path | None:
        """Write what was recorded of ``envs`` (None: all) as H.264 (yuv420p, plays in browsers).

        The file appears under its name when it is complete. An env that ended before the others stays on its last
        frame, dimmed.

        Returns:
            The file, or None if nothing of them was recorded.
        """
        shown = {env_index: self._moments[env_index] for env_index in self.tiles(envs)}
        if not shown:
            return None
        path = Path(path)
        with atomic(path, shared=True) as scratch:
            write_h264(scratch, map(np.asarray, self._pictures(shown)), self.fps, ENCODER, movflags="+faststart")
        return path

    def _pictures(self, shown: Mapping[int, list[_Moment]]) -> Iterator[Image.Image]:
        """Each picture of a video of these envs. It is one buffer that the next step draws over."""
        style, grid = self._layout(shown)
        picture = canvas(grid)
        for time in range(max(len(moments) for moments in shown.values())):
            for env_index, moments in shown.items():
                if time <= len(moments):
                    ended = time == len(moments)
                    tile = self._tile(style, moments[min(time, len(moments) - 1)], ended=ended)
                    picture.paste(tile, grid.tiles[env_index][:2])
            yield picture

    def _layout(self, shown: Mapping[int, list[_Moment]]) -> tuple[TileStyle, Grid]:
        """Sizes of the tiles, and where they lie."""
        assert self._image_size is not None
        instructions = {moment.instruction for moments in shown.values() for moment in moments}
        style = TileStyle(*self._image_size, instructions, captions=self.info_on_video)
        return style, arrange(list(shown), self.group_size, style.width, style.height)

    def _tile(self, style: TileStyle, moment: _Moment, *, ended: bool) -> Image.Image:
        caption = None
        if self.info_on_video:
            caption = style.caption(
                moment.instruction,
                step=moment.step,
                reward=moment.reward,
                reward_sum=moment.reward_sum,
                success=moment.success,
                ended=ended,
            )
        return style.tile(self._load(moment), caption, success=moment.success, ended=ended)


def filmed_states(tasks: Iterable[range], max_videos: int | None) -> set[int]:
    """The initial states whose episodes an evaluation films: each task's first ``max_videos``; None: all."""
    return {state for states in tasks for state in states[:max_videos]}


def video_name(episodes: Sequence[EpisodeRecord], states: range) -> str:
    """A file name for episodes of one task, by their initial states and how many succeeded:
    ``task_03_put_the_bowl_on_the_plate_states_0-1_success_1_of_2.mp4``.

    Args:
        states: all initial states of the task.
    """
    numbers = sorted(episode.reset_state_id - states.start for episode in episodes)
    which = f"state_{numbers[0]}" if len(numbers) == 1 else f"states_{numbers[0]}-{numbers[-1]}"
    won = sum(episode.success for episode in episodes)
    name = task_name(episodes[0].task_id, min(episode.instruction for episode in episodes))
    return f"task_{name}_{which}_success_{won}_of_{len(episodes)}.mp4"


def write_h264(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    fps: float,
    options: Mapping[str, str],
    *,
    threads: int = 0,
    **container_options: str,
) -> None:
    """Write an MP4 file (yuv420p, plays in browsers) of ``frames``, each [H,W,3] RGB with even sides.

    Args:
        options: of the encoder libx264.
        threads: of the encoder; 0: as many as it likes. With one, equal frames give equal files.
    """
    import av  # a tenth of a second, which runs without videos need not wait

    with av.open(str(path), "w", format="mp4", options=container_options) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=dict(options))
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", threads
        for number, frame in enumerate(frames):
            if number == 0:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
