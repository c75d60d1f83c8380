from __future__ import annotations

import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.evaluation.tiles import BACKGROUND, BORDER, SUCCESS, TileStyle, arrange
from embodied_rl.evaluation.video import VideoRecorder, filmed_states, video_name

BOWL = "pick up the black bowl and place it on the plate"
RED, BLUE = (200, 30, 30), (30, 30, 200)


def flat(colour: tuple[int, int, int], size: int = 64) -> NDArray[np.uint8]:
    return np.full((size, size, 3), colour, np.uint8)


def record(
    recorder: VideoRecorder, env: int, steps: range, frame: NDArray[np.uint8], *, success_at: int = -1, text: str = BOWL
) -> None:
    for step in steps:
        done = step == success_at
        recorder.record(env, frame, instruction=text, episode_step=step, reward=float(done), success=done)


def read(path: Path) -> list[NDArray[np.uint8]]:
    with av.open(str(path)) as container:
        return [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in container.decode(video=0)]


class Layout:
    """Where things are in a video of 128-pixel tiles."""

    def __init__(self, envs: list[int], group_size: int = 1, *, captions: bool = True, text: str = BOWL) -> None:
        self.style = TileStyle(128, 128, [text], captions=captions)
        self.grid = arrange(envs, group_size, self.style.width, self.style.height)

    def image(self, picture: NDArray[np.uint8], env: int) -> NDArray[np.uint8]:
        left, top, _, _ = self.grid.tiles[env]
        return picture[top + BORDER : top + BORDER + 128, left + BORDER : left + BORDER + 128]

    def caption(self, picture: NDArray[np.uint8], env: int) -> NDArray[np.uint8]:
        left, top, right, bottom = self.grid.tiles[env]
        return picture[top + BORDER + 128 : bottom - BORDER, left + BORDER : right - BORDER]

    def border(self, picture: NDArray[np.uint8], env: int) -> NDArray[np.float64]:
        left, top, _, bottom = self.grid.tiles[env]
        return picture[top + 20 : bottom - 20, left + 1 : left + BORDER - 1].reshape(-1, 3).mean(0)


def near(colour: NDArray[np.float64], expected: tuple[float, ...], tolerance: float = 16) -> bool:
    """H.264 keeps colours only roughly."""
    return bool(np.abs(colour - np.asarray(expected)).max() < tolerance)


def test_file_is_h264_for_browsers_with_the_given_rate_and_size(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=20, tile_size=128)
    record(recorder, 0, range(1, 8), flat(RED))
    path = tmp_path / "new" / "folder" / "a.mp4"
    assert recorder.finish(path) == path
    assert list(path.parent.iterdir()) == [path], "no partial file is left"
    expected = Layout([0]).grid
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (20, 7)
        assert (stream.width, stream.height) == (expected.width, expected.height)
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a browser can start before it has the whole file"


def test_frames_arriving_chunk_by_chunk_play_side_by_side(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    for chunk in range(2):
        for env, colour in ((0, RED), (1, BLUE)):
            steps = range(4 * chunk + 1, 4 * chunk + 5)
            record(recorder, env, steps, flat(tuple(c + 10 * chunk for c in colour)))  # type: ignore[arg-type]
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    pictures, layout = read(path), Layout([0, 1])
    assert len(pictures) == 8
    for time, picture in enumerate(pictures):
        for env, colour in ((0, RED), (1, BLUE)):
            expected = tuple(c + 10 * (time // 4) for c in colour)
            assert near(layout.image(picture, env).reshape(-1, 3).mean(0), expected, 6), (time, env)


def test_caption_changes_with_the_step_and_image_stays_clean(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    record(recorder, 0, range(1, 4), flat(RED))
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    first, _, last = read(path)
    layout = Layout([0])
    assert np.abs(layout.caption(first, 0).astype(int) - layout.caption(last, 0)).max() > 60
    assert layout.image(last, 0)[8:-8, 8:-8].std(axis=(0, 1)).max() < 4, "no text on the camera image"
    assert layout.caption(last, 0).max() > 200, "light text"
    assert np.median(layout.caption(last, 0)) < 50, "on a dark strip"


def test_border_is_green_from_success_on_and_an_ended_tile_freezes_dimmed(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    record(recorder, 0, range(1, 11), flat(RED))
    record(recorder, 1, range(1, 7), flat(BLUE), success_at=4)
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    pictures, layout = read(path), Layout([0, 1])
    green = [near(layout.border(picture, 1), SUCCESS) for picture in pictures]
    assert green == [False] * 3 + [True] * 7, "also after the step of success itself"
    assert not any(near(layout.border(picture, 0), SUCCESS) for picture in pictures)
    blue = [layout.image(picture, 1)[..., 2].mean() for picture in pictures]
    assert np.allclose(blue[:6], BLUE[2], atol=8)
    assert np.allclose(blue[6:], BLUE[2] / 2, atol=8)


def test_a_smaller_step_starts_a_new_episode_in_the_tile(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    record(recorder, 0, range(1, 4), flat(RED), success_at=3)
    record(recorder, 0, range(1, 4), flat(RED))
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    layout = Layout([0])
    green = [near(layout.border(picture, 0), SUCCESS) for picture in read(path)]
    assert green == [False, False, True, False, False, False]


def test_each_group_has_a_coloured_frame(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128, group_size=2)
    for env in range(4):
        record(recorder, env, range(1, 3), flat(RED))
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    picture, layout = read(path)[0], Layout([0, 1, 2, 3], 2)
    assert len({layout.grid.tiles[env][1] for env in (0, 1)}) == 1
    colours = []
    for left, top, _, bottom in layout.grid.groups.values():
        colours.append(picture[top + 20 : bottom - 20, left + 1].mean(0))
    assert np.abs(colours[0] - colours[1]).max() > 60
    assert all(np.abs(colour - np.asarray(BACKGROUND)).max() > 60 for colour in colours)


def test_without_captions_the_picture_is_only_images(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128, info_on_video=False)
    record(recorder, 0, range(1, 3), flat(RED))
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    grid = Layout([0], captions=False).grid
    assert read(path)[0].shape == (grid.height, grid.width, 3)
    assert grid.tiles[0][3] - grid.tiles[0][1] == 128 + 2 * BORDER


def test_tiles_of_other_sizes_are_fitted_into_the_first_ones_shape(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    record(recorder, 0, range(1, 3), flat(RED, 64))
    record(recorder, 1, range(1, 3), np.full((100, 400, 3), BLUE, np.uint8))
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    image = Layout([0, 1]).image(read(path)[0], 1).astype(float)
    assert near(image[56:72].reshape(-1, 3).mean(0), BLUE)
    assert near(image[4:40].reshape(-1, 3).mean(0), BACKGROUND), "bars above and below a wide image"


@pytest.mark.parametrize(
    ("group_size", "max_tiles", "kept"),
    [
        (1, 3, [8, 9, 10]),
        (1, 7, list(range(8, 15))),
        (4, 6, [8, 9, 10, 11]),
        (4, 8, list(range(8, 16))),
        (4, 2, [8, 9]),
    ],
)
def test_max_tiles_keeps_whole_groups(tmp_path: Path, group_size: int, max_tiles: int, kept: list[int]) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128, group_size=group_size, max_tiles=max_tiles)
    for env in range(8, 20):
        record(recorder, env, range(1, 3), flat(RED))
    tiles = recorder.tiles()
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    grid = Layout(kept, group_size).grid
    assert tiles == {env: place for place, env in enumerate(kept)}
    if group_size == 1:  # numbered in reading order
        boxes = grid.tiles
        assert sorted(boxes, key=lambda env: (boxes[env][1], boxes[env][0])) == sorted(tiles, key=lambda e: tiles[e])
    assert read(path)[0].shape == (grid.height, grid.width, 3)


def test_recorder_is_empty_after_finish_and_writes_nothing_without_frames(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128)
    assert recorder.wants(0)
    assert recorder.finish(tmp_path / "none.mp4") is None
    record(recorder, 0, range(1, 5), flat(RED))
    recorder.finish(tmp_path / "first.mp4")
    record(recorder, 0, range(1, 3), flat(RED))
    path = recorder.finish(tmp_path / "second.mp4")
    assert path is not None
    assert len(read(path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.mp4", "second.mp4"]


def test_a_video_of_some_of_the_envs(tmp_path: Path) -> None:
    recorder = VideoRecorder(fps=10, tile_size=128, only=[3, 5, 8])
    assert [env for env in range(10) if recorder.wants(env)] == [3, 5, 8]
    for env, colour in ((3, RED), (4, RED), (5, BLUE), (8, BLUE)):
        record(recorder, env, range(1, 1 + env), flat(colour))
    assert recorder.tiles() == {3: 0, 5: 1, 8: 2}
    assert recorder.tiles({8, 5, 4}) == {5: 0, 8: 1}
    path = recorder.write(tmp_path / "a.mp4", {8, 5, 4})
    assert path is not None
    assert read(path)[0].shape == (Layout([5, 8]).grid.height, Layout([5, 8]).grid.width, 3)
    assert len(read(path)) == 8
    assert recorder.write(tmp_path / "none.mp4", {4}) is None
    recorder.clear()
    assert recorder.tiles() == {}
    assert recorder.wants(3) and not recorder.wants(4)


def episode(task: int, state: int, *, success: bool) -> EpisodeRecord:
    return EpisodeRecord(
        env_id=0,
        task_id=task,
        instruction="Put the bowl, on the plate!",
        reset_state_id=state,
        success=success,
        episode_return=0.0,
        episode_length=1,
    )


def test_files_are_named_by_task_states_and_outcome() -> None:
    states = range(100, 150)
    both = [episode(3, 101, success=True), episode(3, 100, success=False)]
    assert video_name(both, states) == "task_03_put_the_bowl_on_the_plate_states_0-1_success_1_of_2.mp4"
    assert video_name(both[:1], states) == "task_03_put_the_bowl_on_the_plate_state_1_success_1_of_1.mp4"


def test_the_first_states_of_each_task_are_filmed() -> None:
    tasks = [range(0, 5), range(50, 51)]
    assert filmed_states(tasks, 2) == {0, 1, 50}
    assert filmed_states(tasks, None) == {0, 1, 2, 3, 4, 50}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    # Noise is the worst case for JPEG. 8 envs x 60 steps of 256 x 256 are 94 MB raw.
    recorder = VideoRecorder(fps=20)
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    tracemalloc.start()
    try:
        for env in range(8):
            record(recorder, env, range(1, 61), noise)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    raw = 8 * 60 * noise.nbytes
    assert current < 64 * 2**20 + 4 * 2**20 < raw
    assert peak < 80 * 2**20


def test_long_recordings_go_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.evaluation.video._SPOOL_BYTES", 20_000)
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    recorder = VideoRecorder(fps=20)
    tracemalloc.start()
    try:
        record(recorder, 0, range(1, 31), noise)
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 200_000
    path = recorder.finish(tmp_path / "a.mp4")
    assert path is not None
    assert len(read(path)) == 30


@pytest.mark.parametrize(
    "frame", [np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8)]
)
def test_refuses_frames_that_are_no_rgb_images(frame: NDArray[np.uint8]) -> None:
    recorder = VideoRecorder(fps=20)
    with pytest.raises(ValueError, match=r"expected \[H,W,3\] uint8"):
        recorder.record(0, frame, instruction="", episode_step=1, reward=0.0, success=False)


def test_refuses_sizes_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="tile_size=20, expected at least 96"):
        VideoRecorder(fps=20, tile_size=20)
    with pytest.raises(ValueError, match="fps=0"):
        VideoRecorder(fps=0)


def test_captions_wrap_and_end_in_an_ellipsis() -> None:
    long = "pick up the black bowl between the plate and the ramekin " * 4
    style = TileStyle(256, 256, [long], captions=True)
    lines = style.wrap(long)
    assert len(lines) == style.instruction_lines == 3
    assert lines[-1].endswith("…")
    assert not lines[0].endswith("…")
    assert all(style.font.getlength(line) <= 256 for line in lines)
    assert style.wrap("open the drawer") == ["open the drawer"]
    assert style.font.getlength(style.wrap("x" * 300)[0]) <= 256
