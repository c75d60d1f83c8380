"""MP4 files of camera images: encode an episode, join episodes without encoding again, decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from embodied_rl.errors import UserError
from embodied_rl.evaluation.video import write_h264

_OPTIONS = {"crf": "10", "preset": "medium", "g": "10", "bf": "0", "mbtree": "0"}
"""Nearly without loss; a key frame every 10 frames, so that single frames are found quickly; no frame refers to a later
one, so that the order of storage is that of time and files can be joined; no macroblock tree, whose lookahead makes
other files of the same small images now and then (one of 100 at 16x16 pixels, one of 1,000 at 48x48)."""


def encode(path: Path, images: NDArray[np.uint8], fps: float) -> None:
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
    write_h264(path, images, fps, _OPTIONS, threads=1)  # equal images give equal files, and workers share the cores


def join(path: Path, parts: Iterable[Path], fps: float) -> None:
    """Put videos that :func:`encode` wrote, all of one size, one behind the other."""
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


def decode(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Each frame as (seconds since the file's start, [H,W,3] RGB), in the order of time.

    Raises:
        UserError: no video, or a damaged one.
    """
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                yield float(frame.time or 0.0), np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
    except (FFmpegError, IndexError, OSError) as error:
        raise UserError(f"{path}: not a readable video ({error}); the data set is damaged: copy it anew") from error
