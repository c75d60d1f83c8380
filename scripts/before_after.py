"""Draw a task's videos of a run's first and best evaluation side by side: an animated GIF.

python scripts/before_after.py RUN TASK OUT.gif
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import imageio.v3 as iio
from PIL import Image, ImageDraw, ImageFont

from embodied_rl.errors import UserError
from embodied_rl.report.data import Evaluation, find_run, read_run

WIDTH: Final = 384  # of one side, in pixels
HEADING: Final = 40
EVERY: Final = 2  # frames
HOLD_MS: Final = 2500  # of the last frame
BACKGROUND, TEXT, GAP = (14, 16, 20), (236, 238, 241), 8


def before_after(run_dir: Path, task: int) -> tuple[list[Image.Image], float]:
    """Frames and the milliseconds of each.

    Raises:
        UserError: the run has no two evaluations that filmed the task.
    """
    run = read_run(run_dir)
    later = list(run.evaluations.values())[1:]
    if run.first is None or not later:
        raise UserError(f"{run_dir}: expected two evaluations; train with runner.val_before_train=true")
    best = max(later, key=lambda evaluation: evaluation.rate or 0.0)
    sides = [_side(evaluation, task) for evaluation in (run.first, best)]
    fps = sides[0][1]
    frames = []
    longest = max(len(pictures) for pictures, _ in sides)
    height = max(pictures[0].height for pictures, _ in sides)
    for index in range(0, longest, EVERY):
        frame = Image.new("RGB", (2 * WIDTH + GAP, height), BACKGROUND)
        for number, (pictures, _) in enumerate(sides):
            frame.paste(pictures[min(index, len(pictures) - 1)], (number * (WIDTH + GAP), 0))
        frames.append(frame)
    return frames, 1000 * EVERY / fps


def _side(evaluation: Evaluation, task: int) -> tuple[list[Image.Image], float]:
    """One evaluation's first video of the task under a heading, and its frames per second."""
    film = next((film for film in evaluation.films if film.task == task), None)
    if film is None:
        raise UserError(f"step {evaluation.step}: no video of task {task}; set env.eval.video_cfg.save_video=true")
    heading = f"after {evaluation.step} steps" if evaluation.step else "before training"
    heading += f": {sum(film.outcomes)} of {len(film.outcomes)}"
    fps = float(iio.immeta(film.path, plugin="pyav")["fps"])
    return list(_titled(film.path, heading)), fps


def _titled(path: Path, heading: str) -> Iterator[Image.Image]:
    font = ImageFont.load_default(20)
    for array in iio.imiter(path, plugin="pyav"):
        picture = Image.fromarray(array)
        picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
        frame = Image.new("RGB", (WIDTH, HEADING + picture.height), BACKGROUND)
        frame.paste(picture, (0, HEADING))
        ImageDraw.Draw(frame).text((WIDTH // 2, HEADING // 2), heading, fill=TEXT, font=font, anchor="mm")
        yield frame


def main() -> None:
    run, task, out = sys.argv[1:]
    frames, milliseconds = before_after(find_run(Path(run)), int(task))
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    for number, frame in enumerate((frames[0], frames[-1])):  # the last has the colour of success
        both.paste(frame, (0, number * frame.height))
    palette = both.quantize(255, method=Image.Quantize.MAXCOVERAGE)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(milliseconds)] * (len(small) - 1) + [HOLD_MS]
    small[0].save(out, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)
    print(f"{out}: {len(small)} frames, {Path(out).stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
