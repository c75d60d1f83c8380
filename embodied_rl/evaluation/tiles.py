"""The pictures of a video: where each tile lies, and how it is drawn, a camera image and a caption strip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

BORDER = 4
"""Around each tile; green after success."""
GAP = 4
"""Between the tiles of a group."""
GROUP_FRAME = 6
"""Coloured frame and padding around the tiles of a group."""
GROUP_GAP = 12
"""Between groups and around all of them."""
MAX_TILES_IN_ROW = 8
"""A larger group continues in the next row, inside the same frame."""
_TARGET_ASPECT = 16 / 9

BACKGROUND = (14, 16, 20)
_CAPTION = (26, 29, 35)
_TEXT = (236, 238, 241)
_QUIET_TEXT = (158, 166, 176)
_BORDER = (48, 53, 62)
SUCCESS = (52, 199, 89)
"""Border and badge of a tile whose episode has succeeded."""
_GROUP_COLOURS = ((88, 150, 240), (240, 160, 70), (176, 128, 240), (236, 110, 170), (228, 206, 80), (80, 205, 215))
_DIMMED = 0.5
_MAX_INSTRUCTION_LINES = 3


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
    for number, (group, envs) in enumerate(members.items()):
        left = GROUP_GAP + number % columns * (block_width + between)
        top = GROUP_GAP + number // columns * (block_height + between)
        if framed:
            groups[group] = (left, top, left + block_width, top + block_height)
        for position, env_index in enumerate(envs):
            x = left + frame + position % in_row * (cell_width + GAP)
            y = top + frame + position // in_row * (cell_height + GAP)
            tiles[env_index] = (x, y, x + cell_width, y + cell_height)
    return Grid(width=width + width % 2, height=height + height % 2, tiles=tiles, groups=groups)


class TileStyle:
    """Sizes of one video's tiles: ``image_width`` x ``image_height`` pixels and the caption that fits its instructions.

    Args:
        instructions: all that will be shown; the caption has the lines the longest needs, at most three.
        captions: False leaves the caption strip out.
    """

    def __init__(self, image_width: int, image_height: int, instructions: Iterable[str], *, captions: bool) -> None:
        self.image_size = (image_width, image_height)
        self.captions = captions
        self.font_size = min(max(image_width // 18, 10), 26)
        self.font = ImageFont.load_default(size=self.font_size)
        self.line_height = round(self.font_size * 1.35)
        self.margin = self.font_size // 2
        self.instruction_lines = max((len(self.wrap(text)) for text in instructions), default=1)
        strip = (self.instruction_lines + 2) * self.line_height + 3 * self.margin if captions else 0
        self.width, self.height = image_width, image_height + strip
        self._strips: dict[str, Image.Image] = {}

    def wrap(self, text: str) -> list[str]:
        """Lines that fit the tile; the last of three ends in an ellipsis if there is more."""
        room = self.image_size[0] - 2 * self.margin
        lines: list[str] = []
        for word in text.split():
            if lines and self.font.getlength(f"{lines[-1]} {word}") <= room:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        if len(lines) > _MAX_INSTRUCTION_LINES:
            lines = lines[:_MAX_INSTRUCTION_LINES]
            lines[-1] += " …"
        return [self._shorten(line, room) for line in lines]

    def _shorten(self, line: str, room: float) -> str:
        while len(line) > 1 and self.font.getlength(line) > room:
            line = line.rstrip(" …")[:-1] + "…"
        return line

    def _instruction_strip(self, instruction: str) -> Image.Image:
        if instruction in self._strips:
            return self._strips[instruction]
        strip = self._strips[instruction] = Image.new("RGB", (self.width, self.height - self.image_size[1]), _CAPTION)
        draw = ImageDraw.Draw(strip)
        for number, line in enumerate(self.wrap(instruction)):
            draw.text((self.margin, self.margin + number * self.line_height), line, font=self.font, fill=_TEXT)
        return strip

    def caption(
        self, instruction: str, *, step: int, reward: float, reward_sum: float, success: bool, ended: bool
    ) -> Image.Image:
        """The strip under the image: instruction, step, reward of this step and their sum, success."""
        strip = self._instruction_strip(instruction).copy()
        draw = ImageDraw.Draw(strip)
        first = 2 * self.margin + self.instruction_lines * self.line_height
        second = first + self.line_height
        draw.text((self.margin, first), f"step {step}", font=self.font, fill=_QUIET_TEXT)
        draw.text((self.margin, second), f"reward {reward:+.2f}", font=self.font, fill=_QUIET_TEXT)
        total = f"sum {reward_sum:+.2f}"
        draw.text((self.width - self.margin, second), total, font=self.font, fill=_QUIET_TEXT, anchor="ra")
        if success or ended:
            self._badge(draw, first, "success" if success else "ended", SUCCESS if success else _BORDER)
        return strip

    def _badge(self, draw: ImageDraw.ImageDraw, top: int, text: str, colour: tuple[int, int, int]) -> None:
        right, pad = self.width - self.margin, self.font_size // 2
        left = right - self.font.getlength(text) - 2 * pad
        box = (left, top - 1, right, top + self.line_height - 2)
        draw.rounded_rectangle(box, radius=self.line_height // 2, fill=colour)
        ink = BACKGROUND if colour == SUCCESS else _TEXT
        draw.text(((left + right) / 2, top + (self.line_height - 3) / 2), text, font=self.font, fill=ink, anchor="mm")

    def tile(self, image: Image.Image, caption: Image.Image | None, *, success: bool, ended: bool) -> Image.Image:
        """Border, image and caption. An ended episode's image is dimmed."""
        tile = Image.new("RGB", (self.width + 2 * BORDER, self.height + 2 * BORDER), SUCCESS if success else _BORDER)
        fitted = fit(image, self.image_size)
        tile.paste(fitted.point(lambda value: int(value * _DIMMED)) if ended else fitted, (BORDER, BORDER))
        if caption is not None:
            tile.paste(caption, (BORDER, BORDER + self.image_size[1]))
        return tile


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """``image`` scaled to ``size``, with bars where its aspect ratio differs."""
    if image.size == size:
        return image
    scale = min(size[0] / image.width, size[1] / image.height)
    scaled = image.resize(
        (max(round(image.width * scale), 1), max(round(image.height * scale), 1)), Image.Resampling.BICUBIC
    )
    if scaled.size == size:
        return scaled
    canvas = Image.new("RGB", size, BACKGROUND)
    canvas.paste(scaled, ((size[0] - scaled.width) // 2, (size[1] - scaled.height) // 2))
    return canvas


def canvas(grid: Grid) -> Image.Image:
    """The picture without its tiles: background and the groups' coloured frames."""
    picture = Image.new("RGB", (grid.width, grid.height), BACKGROUND)
    draw = ImageDraw.Draw(picture)
    for group, (left, top, right, bottom) in grid.groups.items():
        colour = _GROUP_COLOURS[group % len(_GROUP_COLOURS)]
        draw.rounded_rectangle((left - 1, top - 1, right, bottom), radius=6, outline=colour, width=4)
    return picture
