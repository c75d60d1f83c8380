"""Videos of the same episodes in two evaluations, as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied_rl.evaluation.side_by_side import HEADING, Clip, write_side_by_side
from embodied_rl.evaluation.tiles import BORDER, arrange
from embodied_rl.evaluation.video import VideoRecorder
from tests.evaluation.test_video import flat, near, read, record

SIZE = 128
COLOURS = {"before": {3: (200, 30, 30), 7: (30, 200, 30)}, "after": {3: (30, 30, 200), 7: (200, 200, 30)}}


def filmed(path: Path, colours: dict[int, tuple[int, int, int]], lengths: dict[int, int]) -> dict[int, Clip]:
    """Record envs of one colour each; returns their clips."""
    recorder = VideoRecorder(fps=20, tile_size=SIZE)
    for env, colour in colours.items():
        record(recorder, env, range(1, 1 + lengths[env]), flat(colour))
    boxes = recorder.boxes()
    recorder.finish(path)
    return {env: Clip(path=path, box=boxes[env], heading=path.stem) for env in colours}


def image(picture: NDArray[np.uint8], box: tuple[int, int, int, int]) -> NDArray[np.float64]:
    """Mean colour of a tile's picture."""
    left, top = box[0] + BORDER, box[1] + HEADING + BORDER
    return picture[top + 20 : top + SIZE - 20, left + 20 : left + SIZE - 20].reshape(-1, 3).mean(0)


def test_each_pair_has_the_first_on_the_left_and_the_longest_film_decides(tmp_path: Path) -> None:
    before = filmed(tmp_path / "before.mp4", COLOURS["before"], {3: 4, 7: 4})
    after = filmed(tmp_path / "after.mp4", COLOURS["after"], {3: 2, 7: 9})
    assert before[3].box != before[7].box
    out = tmp_path / "new" / "both.mp4"
    write_side_by_side(out, [(before[7], after[7]), (before[3], after[3])])
    pictures = read(out)
    left, top, right, bottom = before[3].box
    grid = arrange(range(4), 2, right - left - 2 * BORDER, bottom - top + HEADING - 2 * BORDER)
    assert pictures[0].shape == (grid.height, grid.width, 3)
    assert len(pictures) == 9
    expected = [COLOURS["before"][7], COLOURS["after"][7], COLOURS["before"][3], COLOURS["after"][3]]
    for place, colour in enumerate(expected):
        assert near(image(pictures[0], grid.tiles[place]), colour), place
    assert grid.tiles[0][0] < grid.tiles[1][0] and grid.tiles[0][1] == grid.tiles[1][1]
    assert near(image(pictures[8], grid.tiles[1]), COLOURS["after"][7]), "goes on alone"
    assert near(image(pictures[8], grid.tiles[0]), COLOURS["before"][7]), "stays on its last picture"
    assert near(image(pictures[8], grid.tiles[3]), tuple(c / 2 for c in COLOURS["after"][3])), "ended before its film"
    words = pictures[0][grid.tiles[0][1] : grid.tiles[0][1] + HEADING, grid.tiles[0][0] : grid.tiles[0][2]]
    assert words.max() > 150, "a heading"
    assert list(out.parent.iterdir()) == [out]
