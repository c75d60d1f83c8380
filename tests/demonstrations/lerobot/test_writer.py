from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embodied_rl.demonstrations.dataset import Demonstrations
from embodied_rl.demonstrations.lerobot import episode, metadata, writer
from embodied_rl.demonstrations.lerobot.episode import STAGING, count_staged, staged
from embodied_rl.demonstrations.lerobot.reader import DataSet
from embodied_rl.errors import UserError
from tests.demonstrations.lerobot.recordings import FPS, HEIGHT, WIDTH, data_set, level, put, shapes


def test_the_layout_is_that_of_the_format(tmp_path: Path) -> None:
    data_set(tmp_path, [3, 4])
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and STAGING not in p.parts}
    assert files == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        "videos/observation.images.agentview/chunk-000/file-000.mp4",
        "videos/observation.images.wrist/chunk-000/file-000.mp4",
    }
    info = json.loads((tmp_path / metadata.INFO).read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"], info["total_tasks"]) == (
        "v3.0", 2, 7, 2,
    )  # fmt: skip
    assert info["fps"] == 20 and isinstance(info["fps"], int)
    assert info["splits"] == {"train": "0:2"}


def test_frames_and_episodes_are_numbered_through(tmp_path: Path) -> None:
    data_set(tmp_path, [3, 2, 4])
    table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet").to_pydict()
    assert table["index"] == list(range(9))
    # The even episodes are of task 0 and come first.
    assert table["episode_index"] == [0] * 3 + [1] * 4 + [2] * 2
    assert table["task_index"] == [0] * 7 + [1] * 2
    assert table["frame_index"] == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert table["timestamp"] == pytest.approx([0, 0.05, 0.1, 0, 0.05, 0.1, 0.15, 0, 0.05])
    assert table["next.done"] == [False, False, True, False, False, False, True, False, True]
    records = DataSet.open(tmp_path).episodes()
    assert [(r["dataset_from_index"], r["dataset_to_index"], r["length"]) for r in records] == [
        (0, 3, 3), (3, 7, 4), (7, 9, 2),
    ]  # fmt: skip
    key = "videos/observation.images.wrist"
    assert [r[f"{key}/from_timestamp"] for r in records] == pytest.approx([0, 0.15, 0.35])
    assert [r[f"{key}/to_timestamp"] for r in records] == pytest.approx([0.15, 0.35, 0.45])
    assert [(r["task_id"], r["reset_state_id"], r["success"]) for r in records] == [
        (0, 100, True), (0, 102, True), (1, 101, True),
    ]  # fmt: skip
    assert DataSet.open(tmp_path).tasks() == ["do task 0", "do task 1"]


def test_later_episodes_are_added_behind(tmp_path: Path) -> None:
    data_set(tmp_path, [3, 2])
    before = (tmp_path / "data/chunk-000/file-000.parquet").read_bytes()
    shutil.rmtree(tmp_path / STAGING)
    put(tmp_path, 2, 4)
    writer.append(tmp_path, staged(tmp_path), shapes(), robot_type="test")
    assert (tmp_path / "data/chunk-000/file-000.parquet").read_bytes() == before
    read = Demonstrations(tmp_path, chunk=1)
    obs, actions, _ = read.sample(range(9))
    assert obs.state[:, 0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert obs.instructions[-1] == "do task 0"
    assert actions[-1, 0].tolist() == pytest.approx([2.03, 2.03])
    got = obs.images["agentview"][:, 8, 8, 0].tolist()
    assert got == pytest.approx([level(e, t) for e, n in ((0, 3), (1, 2), (2, 4)) for t in range(n)], abs=2)


@pytest.mark.parametrize("dropped", ["start_level", "terminated"])
def test_files_of_one_data_set_have_the_same_columns(tmp_path: Path, dropped: str) -> None:
    """Also where the first are from before a column was there: lerobot refuses others."""
    data_set(tmp_path, [3])
    [first] = tmp_path.glob("meta/episodes/*/*.parquet")
    table = pq.read_table(first)
    assert table["start_level"].to_pylist() == [0.0]
    assert table["terminated"].to_pylist() == [False]
    pq.write_table(table.drop_columns([dropped]), first)
    put(tmp_path, 2, 4)
    writer.append(tmp_path, staged(tmp_path)[1:], shapes(), robot_type="test")
    schemas = [pq.read_schema(path) for path in sorted(tmp_path.glob("meta/episodes/*/*.parquet"))]
    assert schemas[0].names == schemas[1].names


def test_what_a_killed_writer_left_is_no_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_set(tmp_path, [3])
    shutil.rmtree(tmp_path / STAGING)
    put(tmp_path, 2, 4)

    def die(path: Path, content: object, allow_nan: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_json", die)
        with pytest.raises(KeyboardInterrupt):
            writer.append(tmp_path, staged(tmp_path), shapes(), robot_type="test")
    assert (tmp_path / "data/chunk-000/file-001.parquet").exists()
    left = Demonstrations(tmp_path, chunk=1)
    assert (left.num_episodes, left.num_frames) == (1, 3)
    writer.append(tmp_path, staged(tmp_path), shapes(), robot_type="test")
    whole = Demonstrations(tmp_path, chunk=1)
    assert (whole.num_episodes, whole.num_frames) == (2, 7)
    assert whole.sample(range(7))[0].state[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_large_videos_are_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(tmp_path, 2 * number, 5)
    size = max(p.stat().st_size for p in tmp_path.rglob("*.mp4"))
    monkeypatch.setattr(metadata, "VIDEO_FILE_MB", 2.5 * size / 2**20)
    writer.append(tmp_path, staged(tmp_path), shapes(), robot_type="test")
    assert len(list(tmp_path.glob("videos/observation.images.wrist/*/*.mp4"))) == 2
    records = DataSet.open(tmp_path).episodes()
    assert [r["data/file_index"] for r in records] == [0, 0, 1]
    assert records[2]["videos/observation.images.wrist/from_timestamp"] == 0
    levels = Demonstrations(tmp_path, chunk=1).sample([0, 5, 10])[0].images["agentview"][:, 0, 0, 0]
    assert levels.tolist() == pytest.approx([level(0, 0), level(2, 0), level(4, 0)], abs=2)


def test_statistics_by_hand(tmp_path: Path) -> None:
    data_set(tmp_path, [2, 3], videos=False)
    stats = json.loads((tmp_path / metadata.STATS).read_text())
    # Actions: 0, 0.01 of the first episode; 1, 1.01, 1.02 of the second.
    assert stats["action"]["mean"] == pytest.approx([3.04 / 5] * 2)
    assert stats["action"]["min"] == [0, 0] and stats["action"]["max"] == pytest.approx([1.02] * 2)
    assert stats["action"]["q50"] == pytest.approx([1.0] * 2)
    assert stats["action"]["q10"] == pytest.approx([0.004] * 2)  # 0.4 of the way from 0 to 0.01
    assert stats["action"]["count"] == [5]
    levels = np.array([0, 4, 37, 41, 45]) / 255
    image = stats["observation.images.agentview"]
    assert np.array(image["mean"]).shape == (3, 1, 1)
    assert np.ravel(image["mean"]) == pytest.approx([levels.mean()] * 3)
    assert np.ravel(image["std"]) == pytest.approx([levels.std()] * 3)
    assert np.ravel(image["min"])[0] == 0 and np.ravel(image["max"])[0] == pytest.approx(45 / 255)
    assert image["count"] == [5]


def test_an_episode_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path, images: object, fps: float) -> None:
        path.write_bytes(b"half a video")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(episode, "encode_video", die)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, 0, 3)
    assert staged(tmp_path) == [] and count_staged(tmp_path).successes == 0
    put(tmp_path, 0, 3)
    put(tmp_path, 1, 5, success=False, keep=False)
    assert [(e.facts.length, e.kept) for e in staged(tmp_path)] == [(3, True), (5, False)]
    assert (count_staged(tmp_path).successes, count_staged(tmp_path).failures) == (1, 1)


def test_joined_videos_play_at_the_right_times(tmp_path: Path) -> None:
    for part, first in (("a", 10), ("b", 100)):
        images = np.stack([np.full((HEIGHT, WIDTH, 3), first + 20 * t, np.uint8) for t in range(3)])
        episode.encode_video(tmp_path / f"{part}.mp4", images, FPS)
    episode.join_videos(tmp_path / "both.mp4", [tmp_path / "a.mp4", tmp_path / "b.mp4"], FPS)
    frames = list(episode.decode_video(tmp_path / "both.mp4"))
    assert [seconds for seconds, _ in frames] == pytest.approx([0.05 * i for i in range(6)], abs=1e-6)
    assert [int(image[8, 8, 1]) for _, image in frames] == pytest.approx([10, 30, 50, 100, 120, 140], abs=2)


def test_noise_survives_the_video_nearly_as_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (4, 32, 32, 1)).repeat(3, axis=3).astype(np.uint8)
    episode.encode_video(tmp_path / "v.mp4", grey, FPS)
    got = np.stack([image for _, image in episode.decode_video(tmp_path / "v.mp4")])
    assert np.abs(got.astype(int) - grey).mean() < 3


def test_odd_sizes_need_png(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"15x24 pixels cannot become a video.*collect.image_format=png"):
        episode.encode_video(tmp_path / "v.mp4", np.zeros((1, 15, 24, 3), np.uint8), FPS)


@pytest.mark.parametrize(
    ("total", "message"), [(8, "total_frames is 8, its episodes have 7"), (-1, "total_frames is -1")]
)
def test_wrong_totals_are_refused(tmp_path: Path, total: int, message: str) -> None:
    data_set(tmp_path, [3, 4])
    path = tmp_path / metadata.INFO
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_frames": total}))
    with pytest.raises(UserError, match=message):
        DataSet.open(tmp_path).episodes()
