"""Records the frames of some envs and writes them as one video, a tile each."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embodied_rl.evaluation.tiles import TileStyle, arrange, canvas, fit
from embodied_rl.files import atomic

MIN_TILE_SIZE = 96
"""Below this a caption does not fit."""
_SPOOL_BYTES = 64 * 2**20
_JPEG = {"quality": 92, "subsampling": 0}
_ENCODER = {"crf": "20", "preset": "veryfast"}


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
    """

    def __init__(
        self,
        *,
        fps: float,
        group_size: int = 1,
        tile_size: int = 256,
        info_on_video: bool = True,
        max_tiles: int = 16,
    ) -> None:
        for name, value, least in (("group_size", group_size, 1), ("tile_size", tile_size, MIN_TILE_SIZE),
                                   ("max_tiles", max_tiles, 1)):  # fmt: skip
            if value < least:
                raise ValueError(f"VideoRecorder: got {name}={value}, expected at least {least}")
        if not fps > 0:
            raise ValueError(f"VideoRecorder: got fps={fps}, expected a positive number of frames per second")
        self.fps, self.group_size, self.tile_size = fps, group_size, tile_size
        self.info_on_video, self.max_tiles = info_on_video, max_tiles
        self.wants_frames = True
        """Set to False to make the env base skip rendering."""
        self._clear()

    def _clear(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - closed by finish
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
            if not self._has_room(env_index):
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

    def _has_room(self, env_index: int) -> bool:
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

    @property
    def tiles(self) -> dict[int, int]:
        """Env index -> its tile's number, in the order in which tiles stand; envs without room are left out."""
        return {env_index: number for number, env_index in enumerate(sorted(self._moments))}

    def finish(self, path: Path | str) -> Path | None:
        """Write what was recorded as H.264 (yuv420p, plays in browsers) and forget it.

        The file appears under its name when it is complete. An env that ended before the others stays on its last
        frame, dimmed.

        Returns:
            The file, or None if nothing was recorded.
        """
        if self._image_size is None:
            return None
        path = Path(path)
        try:
            with atomic(path, shared=True) as scratch:
                write_h264(scratch, map(np.asarray, self._pictures()), self.fps, _ENCODER, movflags="+faststart")
        finally:
            self._spool.close()
            self._clear()
        return path

    def _pictures(self) -> Iterator[Image.Image]:
        """Each picture of the video. It is one buffer that the next step draws over."""
        assert self._image_size is not None
        instructions = {moment.instruction for moments in self._moments.values() for moment in moments}
        style = TileStyle(*self._image_size, instructions, captions=self.info_on_video)
        grid = arrange(list(self._moments), self.group_size, style.width, style.height)
        picture = canvas(grid)
        for time in range(max(len(moments) for moments in self._moments.values())):
            for env_index, moments in self._moments.items():
                if time <= len(moments):
                    ended = time == len(moments)
                    tile = self._tile(style, moments[min(time, len(moments) - 1)], ended=ended)
                    picture.paste(tile, grid.tiles[env_index][:2])
            yield picture

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
    with av.open(str(path), "w", format="mp4", options=container_options) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=dict(options))
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", threads
        for number, frame in enumerate(frames):
            if number == 0:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
