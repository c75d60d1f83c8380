"""Two evaluations' videos of the same episodes as one: of each pair the first on the left, the second on the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from embodied_rl.evaluation.tiles import BORDER, Grid, arrange, canvas
from embodied_rl.evaluation.video import ENCODER, write_h264
from embodied_rl.files import atomic

if TYPE_CHECKING:
    import av.container

HEADING: Final = 26
"""Height of the line above each tile, in pixels."""
_TEXT: Final = (236, 238, 241)

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels, the last two exclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """An episode's part of a video."""

    path: Path
    box: Box
    heading: str
    """Stands above it."""


def write_side_by_side(path: Path, pairs: Sequence[tuple[Clip, Clip]]) -> None:
    """Write one H.264 video of pairs of clips, which start together; a file that ends before the others stays on its
    last picture. Pairs stand in a coloured frame each.

    Every file is read once, picture by picture.

    Args:
        pairs: at least one; all of them at one frame rate.

    Raises:
        FFmpegError: a file is no video.
    """
    import av  # as in video

    clips = [clip for pair in pairs for clip in pair]
    width, height = (max(clip.box[axis + 2] - clip.box[axis] for clip in clips) for axis in (0, 1))
    grid = arrange(range(len(clips)), 2, width - 2 * BORDER, height + HEADING - 2 * BORDER)
    with ExitStack() as stack:
        films = {file: stack.enter_context(av.open(str(file))) for file in dict.fromkeys(clip.path for clip in clips)}
        rate = next(iter(films.values())).streams.video[0].average_rate or Fraction(10)
        pictures = {file: _images(film) for file, film in films.items()}
        with atomic(path, shared=True) as scratch:
            frames = map(np.asarray, _composed(clips, grid, pictures))
            write_h264(scratch, frames, float(rate), ENCODER, movflags="+faststart")


def _images(film: av.container.InputContainer) -> Iterator[Image.Image]:
    return (frame.to_image(threads=1) for frame in film.decode(video=0))


def _composed(clips: Sequence[Clip], grid: Grid, films: dict[Path, Iterator[Image.Image]]) -> Iterator[Image.Image]:
    """Each picture. It is one buffer that the next draws over."""
    picture, font = canvas(grid), ImageFont.load_default(HEADING * 5 // 8)
    draw = ImageDraw.Draw(picture)
    for clip, (left, top, right, _) in zip(clips, grid.tiles.values(), strict=True):
        draw.text(((left + right) / 2, top + HEADING / 2), clip.heading, font=font, fill=_TEXT, anchor="mm")
    while shown := {file: image for file, film in films.items() if (image := next(film, None)) is not None}:
        for clip, (left, top, _, _) in zip(clips, grid.tiles.values(), strict=True):
            if clip.path in shown:
                picture.paste(shown[clip.path].crop(clip.box), (left, top + HEADING))
        yield picture
