"""Thumbnails of what a policy learned from, and whether its cameras show that."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from embodied_rl.errors import CheckpointError
from embodied_rl.evaluation.views import (
    COMPARISON,
    FILE,
    MOST,
    PICTURE,
    SIZE,
    Views,
    compare,
    differing,
    record,
    spread,
)


def scene(seed: int, episodes: int = 6, size: int = 64) -> NDArray[np.uint8]:
    """[episodes,size,size,3]: patches of colour, and one that is elsewhere in each episode."""
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (8, 8, 3)).repeat(size // 8, 0).repeat(size // 8, 1)
    pictures = np.tile(patches, (episodes, 1, 1, 1))
    for picture in pictures:
        row, column = rng.integers(0, size - 8, 2)
        picture[row : row + 8, column : column + 8] = (255, 0, 0)
    return pictures.astype(np.uint8)


def views(**cameras: NDArray[np.uint8]) -> Views:
    return Views.of(cameras)


def test_a_thumbnail_is_the_mean_of_equal_areas() -> None:
    picture = np.zeros((1, 32, 48, 3), np.uint8)
    picture[0, 2:4, 3:6] = (240, 120, 60)  # all of one area, 2 by 3 pixels
    picture[0, 0, 0] = 60  # a sixth of another
    [small] = views(top=picture).cameras["top"]
    assert small.shape == (SIZE, SIZE, 3)
    assert small[1, 1].tolist() == [240, 120, 60]
    assert small[0, 0].tolist() == [10, 10, 10]
    assert int(small.astype(int).sum()) == 240 + 120 + 60 + 30


@pytest.mark.parametrize("shape", [(84, 84), (5, 9), (17, 31), (480, 640)])
def test_pictures_of_any_size(shape: tuple[int, int]) -> None:
    pictures = np.full((2, *shape, 3), 77, np.uint8)
    assert np.array_equal(views(top=pictures).cameras["top"], np.full((1, SIZE, SIZE, 3), 77)), "of equal ones one"


@pytest.mark.parametrize(
    ("seen", "explanation"),
    [
        (scene(1)[:, ::-1, ::-1], "turned by 180 degrees"),
        (scene(1)[:, ::-1], "upside down"),
        (scene(1)[:, :, ::-1], "mirrored"),
        (scene(1)[..., ::-1], "with red and blue exchanged"),
        (scene(2), "as pictures of its camera wrist"),
        (scene(3), None),
    ],
)
def test_what_is_wrong_with_a_camera(seen: NDArray[np.uint8], explanation: str | None) -> None:
    found = compare(views(top=scene(1), wrist=scene(2)), views(top=seen, wrist=scene(2)))
    assert found["top"].differs
    assert found["top"].explanation == explanation
    assert found["top"].among is not None
    assert found["top"].likeness < 0.6 < 0.8 < found["top"].among
    assert not found["wrist"].differs
    text = found["top"].describe("top")
    assert (explanation or "another camera, or scenes that it never saw") in text
    assert "show it what it knows" in text


def test_other_episodes_of_the_same_scenes_are_alike() -> None:
    learned = np.concatenate([scene(seed) for seed in range(5)])
    seen = np.concatenate([scene(seed, episodes=9)[6:] for seed in (1, 3)])
    found = compare(views(top=learned), views(top=seen))
    assert not found["top"].differs
    assert found["top"].likeness > 0.9


@pytest.mark.parametrize(("learned", "twins"), [(8, 1), (8, 2), (1, 1)])
def test_pictures_that_are_all_unlike_raise_no_alarm(learned: int, twins: int) -> None:
    """As of a drawing with a few discs on white: what is at the same place is so by chance. Members of a group begin
    alike, which says nothing of how alike beginnings are."""
    rng = np.random.default_rng(0)

    def discs(number: int) -> NDArray[np.uint8]:
        pictures = np.full((number, 64, 64, 3), 255, np.uint8)
        for picture in pictures:
            row, column = rng.integers(0, 52, 2)
            picture[row : row + 12, column : column + 12] = 0
        return pictures

    found = compare(views(top=discs(learned).repeat(twins, 0)), views(top=discs(8)))
    assert (found["top"].among or 0.0) < 0.6
    assert not found["top"].differs


def test_a_single_picture_tells_what_would_explain_another() -> None:
    [found] = compare(views(top=scene(1, 1)), views(top=scene(1, 1)[:, ::-1])).values()
    assert (found.among, found.explanation) == (None, "upside down")
    assert "(likeness" in found.describe("top") and "among" not in found.describe("top")


def test_what_cannot_be_compared() -> None:
    flat = np.full((4, 64, 64, 3), 90, np.uint8)
    learned = views(top=scene(1), flat=flat, dark=scene(2))
    assert not compare(learned, views(other=scene(1)))
    assert not compare(learned, views(flat=scene(1)))
    assert not compare(learned, views(dark=flat))
    assert not compare(learned, views(top=scene(1)[:0]))


def test_they_are_written_and_read(tmp_path: Path) -> None:
    written = views(top=scene(1), wrist=scene(2, size=32))
    written.write(tmp_path / "new")
    read = Views.read(tmp_path / "new")
    assert read is not None
    assert read.cameras.keys() == written.cameras.keys()
    for camera, thumbnails in written.cameras.items():
        assert np.array_equal(read.cameras[camera], thumbnails)
    first = (tmp_path / "new" / FILE).read_bytes()
    read.write(tmp_path / "new")
    assert (tmp_path / "new" / FILE).read_bytes() == first
    assert Views.read(tmp_path) is Views.read(None) is None


def test_damaged_ones_are_named(tmp_path: Path) -> None:
    views(top=scene(1)).write(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=rf"{FILE}: cannot be read .*copy it again"):
        Views.read(tmp_path)
    Views(cameras={"top": scene(1)}).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"top is uint8 \(6, 64, 64, 3\), expected uint8 \(n, 16, 16, 3\)"):
        Views.read(tmp_path)


def test_several_parts_are_one(tmp_path: Path) -> None:
    parts = [views(top=scene(1)), views(top=scene(2), wrist=scene(3))]
    merged = Views.merged(parts)
    assert merged is not None
    assert np.array_equal(merged.cameras["top"], np.concatenate([part.cameras["top"] for part in parts]))
    assert np.array_equal(merged.cameras["wrist"], parts[1].cameras["wrist"])
    assert Views.merged([]) is Views.merged([views()]) is Views.merged([views(top=scene(1)[:0])]) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(1, MOST))
def test_the_kept_ones_are_spread_over_all(number: int, most: int) -> None:
    kept = spread(np.arange(number), most)
    assert len(kept) == min(number, most)
    assert sorted(set(kept.tolist())) == kept.tolist()
    if number and most > 1:
        assert (kept[0], kept[-1]) == (0, number - 1)


def test_a_run_directory_has_the_comparison_and_a_picture(tmp_path: Path) -> None:
    learned = views(top=scene(1), wrist=scene(2))
    assert record(tmp_path, learned, learned) == []
    assert not differing(tmp_path)
    assert not (tmp_path / PICTURE).exists()
    texts = record(tmp_path, learned, views(top=scene(1)[:, ::-1], wrist=scene(2)))
    assert len(texts) == 2
    assert texts[1].startswith(str(tmp_path / PICTURE))
    assert json.loads((tmp_path / COMPARISON).read_text()).keys() == {"top", "wrist"}
    assert list(differing(tmp_path)) == ["top"]
    with Image.open(tmp_path / PICTURE) as picture:
        above, below = np.asarray(picture)[:96, :96], np.asarray(picture)[102:198, :96]
    assert np.array_equal(above[3::6, 3::6], learned.cameras["top"][0])
    assert np.array_equal(below[3::6, 3::6], learned.cameras["top"][0][::-1])
    assert not differing(tmp_path / "a run without pictures")
