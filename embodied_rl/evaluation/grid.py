"""Where each tile of a video lies. Geometry only, in pixels; ``tiles.py`` draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BORDER = 4
"""Around each tile; green after success."""
GAP = 4
"""Between the tiles of a group."""
GROUP_FRAME = 6
"""Coloured frame and padding around the tiles of a group."""
GROUP_GAP = 12
"""Between groups and around all of them."""
MAX_TILES_IN_ROW = 8
"""A larger group goes on in the next row, inside the same frame."""
_TARGET_ASPECT = 16 / 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A video's layout. Boxes are (left, top, right, bottom), right and bottom exclusive."""

    width: int
    height: int
    """Both even, as yuv420p halves them."""
    tiles: dict[int, tuple[int, int, int, int]]
    """Env index -> the tile with its border."""
    groups: dict[int, tuple[int, int, int, int]]
    """Group -> its frame; empty for groups of one."""


def arrange(env_indices: Sequence[int], group_size: int, tile_width: int, tile_height: int) -> Grid:
    """Members of a group side by side, groups in as many columns as bring the whole nearest to 16:9.

    Env ``i`` belongs to group ``i // group_size``. Tiles are ``tile_width`` x ``tile_height`` without their border.
    """
    members: dict[int, list[int]] = {}
    for env_index in sorted(env_indices):
        members.setdefault(env_index // group_size, []).append(env_index)
    cell_width, cell_height = tile_width + 2 * BORDER, tile_height + 2 * BORDER
    framed = group_size > 1
    frame = GROUP_FRAME if framed else 0
    in_row = min(max(len(envs) for envs in members.values()), MAX_TILES_IN_ROW)
    rows = math.ceil(max(len(envs) for envs in members.values()) / in_row)
    block_width = in_row * cell_width + (in_row - 1) * GAP + 2 * frame
    block_height = rows * cell_height + (rows - 1) * GAP + 2 * frame
    between = GROUP_GAP if framed else GAP

    def size(columns: int) -> tuple[int, int]:
        lines = math.ceil(len(members) / columns)
        return (
            columns * block_width + (columns - 1) * between + 2 * GROUP_GAP,
            lines * block_height + (lines - 1) * between + 2 * GROUP_GAP,
        )

    def distance(columns: int) -> float:
        width, height = size(columns)
        return abs(math.log(width / height / _TARGET_ASPECT))

    columns = min(range(1, len(members) + 1), key=distance)
    # As few columns as fill the same number of lines: 5 groups stand as 3 + 2 rather than 4 + 1.
    columns = math.ceil(len(members) / math.ceil(len(members) / columns))
    width, height = size(columns)
    tiles, groups = {}, {}
    for place, (group, envs) in enumerate(members.items()):
        left = GROUP_GAP + place % columns * (block_width + between)
        top = GROUP_GAP + place // columns * (block_height + between)
        if framed:
            groups[group] = (left, top, left + block_width, top + block_height)
        for position, env_index in enumerate(envs):
            x = left + frame + position % in_row * (cell_width + GAP)
            y = top + frame + position // in_row * (cell_height + GAP)
            tiles[env_index] = (x, y, x + cell_width, y + cell_height)
    return Grid(width=width + width % 2, height=height + height % 2, tiles=tiles, groups=groups)
