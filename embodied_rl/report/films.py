"""Videos of the first and the last evaluation, side by side by task, with a picture of each."""

from __future__ import annotations

import base64
import io
import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from embodied_rl.report.data import Evaluation, Film, Run

MOST: Final = 24
"""Videos of an evaluation on the page; its folder has them all."""
_POSTER_WIDTH: Final = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A video as the page shows it."""

    source: str
    """Relative to the page."""
    poster: str
    """Its first picture, as a data URL; empty where it cannot be read."""
    when: str
    outcomes: tuple[bool, ...]

    @property
    def words(self) -> str:
        """How many of its episodes succeeded."""
        count, successes = len(self.outcomes), sum(self.outcomes)
        return ("succeeded" if successes else "failed") if count == 1 else f"{successes} of {count} succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRow:
    """The videos of a task."""

    title: str
    before: tuple[Shown, ...]
    after: tuple[Shown, ...]


def film_rows(run: Run, page: Path) -> tuple[list[FilmRow], int]:
    """The videos of a run by task, and how many are left out.

    Args:
        page: the file that shows them.
    """
    first, last = run.first, run.last
    if first is None or last is None:
        return [], 0
    pair = [first, last] if first is not last else [last]
    titles: dict[str, None] = {}
    shown: list[dict[str, list[Shown]]] = []
    left_out = 0
    for evaluation in pair:
        by_title: dict[str, list[Shown]] = {}
        for film in evaluation.films[:MOST]:
            title = film.label if film.task is None else f"{film.task} · {film.label}"
            titles[title] = None
            by_title.setdefault(title, []).append(_shown(film, evaluation, pair, page))
        shown.append(by_title)
        left_out += max(len(evaluation.films) - MOST, 0)
    before = shown[0] if len(pair) == 2 else {}
    rows = [
        FilmRow(title=title, before=tuple(before.get(title, ())), after=tuple(shown[-1].get(title, ())))
        for title in titles
    ]
    return rows, left_out


def _shown(film: Film, evaluation: Evaluation, pair: Sequence[Evaluation], page: Path) -> Shown:
    word = "" if len(pair) == 1 else "before: " if evaluation is pair[0] else "after: "
    return Shown(
        source=relative(film.path, page),
        poster=poster(film.path),
        when=f"{word}step {evaluation.step}",
        outcomes=film.outcomes,
    )


def relative(path: Path, page: Path) -> str:
    """A file's address in the page."""
    return urllib.parse.quote(Path(os.path.relpath(path.resolve(), page.resolve().parent)).as_posix())


def poster(path: Path) -> str:
    """The first picture of a video as a small JPEG in a data URL; empty where it cannot be read."""
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as container:
            picture = next(container.decode(video=0)).to_image(threads=1)
    except (FFmpegError, OSError, StopIteration):
        return ""
    picture.thumbnail((_POSTER_WIDTH, _POSTER_WIDTH))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=60)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
