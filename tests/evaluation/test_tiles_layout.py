from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.evaluation.tiles import BORDER, arrange

Box = tuple[int, int, int, int]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@given(st.integers(1, 24), st.integers(1, 12), st.integers(32, 321), st.integers(32, 321), st.integers(0, 40))
def test_tiles_have_their_size_lie_in_the_picture_and_do_not_overlap(
    count: int, group_size: int, width: int, height: int, first: int
) -> None:
    envs = list(range(first, first + count))
    grid = arrange(envs, group_size, width, height)
    assert grid.width % 2 == grid.height % 2 == 0
    assert sorted(grid.tiles) == envs
    boxes = list(grid.tiles.values())
    for index, box in enumerate(boxes):
        assert (box[2] - box[0], box[3] - box[1]) == (width + 2 * BORDER, height + 2 * BORDER)
        assert box[0] >= 0
        assert box[1] >= 0
        assert box[2] <= grid.width
        assert box[3] <= grid.height
        assert not any(overlap(box, other) for other in boxes[:index])
    for env, box in grid.tiles.items():
        for group, frame in grid.groups.items():
            inside = frame[0] < box[0] and frame[1] < box[1] and box[2] < frame[2] and box[3] < frame[3]
            assert inside == (group == env // group_size)
            assert inside or not overlap(box, frame)


def test_group_members_stand_in_one_row() -> None:
    grid = arrange(range(12), group_size=4, tile_width=100, tile_height=100)
    for group in range(3):
        members = [grid.tiles[env] for env in range(4 * group, 4 * group + 4)]
        assert len({box[1] for box in members}) == 1
        assert [box[0] for box in members] == sorted(box[0] for box in members)
    assert set(grid.groups) == {0, 1, 2}


def test_five_single_tiles_stand_as_three_and_two() -> None:
    grid = arrange(range(5), group_size=1, tile_width=256, tile_height=340)
    tops = [grid.tiles[env][1] for env in range(5)]
    assert tops[0] == tops[1] == tops[2] < tops[3] == tops[4]
    assert not grid.groups
