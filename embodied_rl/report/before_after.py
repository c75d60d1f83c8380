"""The last evaluation of a run against its first: a table on the console, videos of the same episodes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import Comparison, Recipe, check_comparable, compare
from embodied_rl.evaluation.comparison_report import changes
from embodied_rl.evaluation.side_by_side import Clip, write_side_by_side
from embodied_rl.evaluation.success import task_name
from embodied_rl.report.data import Evaluation, Film, Run, Tile, read_run

FOLDER: Final = "before_after"
"""Beside the folders of the evaluations' videos."""
MOST: Final = 12
"""Tasks of which a run makes such a video at its end; encoding takes seconds each."""

_Place = tuple[Film, Tile]


def gain(runs: Sequence[Run]) -> Comparison | None:
    """The last evaluations of these runs, one recipe's, against their first; None where they cannot be compared."""
    pairs = [(run.first, run.last) for run in runs]
    if any(first is None or last is None or first is last for first, last in pairs):
        return None
    before = tuple(first.saved for first, _ in pairs if first)
    after = tuple(last.saved for _, last in pairs if last)
    try:
        check_comparable([*before, *after])
        return compare(Recipe(name="before", runs=before), Recipe(name="after", runs=after))
    except UserError:  # the run went on with another evaluation
        return None


def show_gain(run_dir: Path, console: Console) -> None:
    """Print the table of a run, write its videos and print where they are: nothing without two evaluations of the same
    episodes, and no videos where none of those were filmed. What fails here fails no run."""
    try:
        _show_gain(read_run(run_dir), console)
    except Exception as error:
        text = f"no comparison of the evaluations: {str(error).strip() or type(error).__name__}"
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _show_gain(run: Run, console: Console) -> None:
    found = gain([run])
    if found is None:
        return
    for part in changes([found]):
        console.print(part)
    files, left_out = write_videos(run)
    for folder in dict.fromkeys(file.parent for file in files):
        more = f"; left out: {left_out} tasks" if left_out else ""
        text = f"videos: {folder} ({len(files)}, before on the left, after on the right{more})"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def write_videos(run: Run, most: int = MOST) -> tuple[list[Path], int]:
    """Write a video for each task of which the first and the last evaluation show the same episodes: ``before_after``
    next to the folders of those has it.

    Returns:
        The files, and the number of tasks left out: with more than ``most`` those in which the fewest episodes turned
        out otherwise.
    """
    first, last = run.first, run.last
    if first is None or last is None or first is last:
        return [], 0
    later = {tile.episode: (film, tile) for film, tile in _shown(last)}
    tasks: dict[int, list[tuple[_Place, _Place]]] = {}
    for film, tile in sorted(_shown(first), key=lambda place: place[1].init_state or 0):
        if tile.episode in later and film.task is not None:
            tasks.setdefault(film.task, []).append(((film, tile), later[tile.episode]))

    def changed(task: int) -> int:
        return sum(before[1].success != after[1].success for before, after in tasks[task])

    chosen = sorted(sorted(tasks, key=changed, reverse=True)[:most])
    files = []
    for task in chosen:
        film = tasks[task][0][0][0]
        path = film.path.parent.with_name(FOLDER) / f"task_{task_name(task, film.label)}.mp4"
        pairs = [(_clip(before, first), _clip(after, last)) for before, after in tasks[task]]
        write_side_by_side(path, pairs)
        files.append(path)
    return files, len(tasks) - len(chosen)


def _shown(evaluation: Evaluation) -> Iterator[_Place]:
    return ((film, tile) for film in evaluation.films for tile in film.tiles if tile.box is not None)


def _clip(place: _Place, evaluation: Evaluation) -> Clip:
    film, tile = place
    assert tile.box is not None
    count = evaluation.step
    when = f"after {count} step{'' if count == 1 else 's'}" if count else "before training"
    return Clip(path=film.path, box=tile.box, heading=f"state {tile.init_state}, {when}")
