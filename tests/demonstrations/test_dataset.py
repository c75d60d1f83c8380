from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.demonstrations.dataset import Aggregate, Demonstrations
from embodied_rl.demonstrations.lerobot import metadata, writer
from embodied_rl.demonstrations.lerobot.episode import staged
from embodied_rl.demonstrations.lerobot.reader import CACHE
from embodied_rl.errors import UserError
from tests.demonstrations.lerobot.recordings import data_set, level, put, shapes
from tests.demonstrations.recording import record


@pytest.mark.parametrize("videos", [True, False])
def test_every_frame_is_read_as_it_was_written(tmp_path: Path, videos: bool) -> None:
    lengths = [5, 12, 1, 7]
    read = Demonstrations(data_set(tmp_path, lengths, videos=videos), chunk=3)
    assert (read.num_episodes, read.num_frames, len(read)) == (4, 25, 25)
    assert (read.cameras, read.state_dim, read.action_dim) == ({"agentview": (16, 24), "wrist": (16, 24)}, 3, 2)
    places = [(e, t) for e in (0, 2, 1, 3) for t in range(lengths[e])]
    order = np.random.default_rng(0).permutation(25).tolist()
    obs, actions, valid = read.sample(order)
    assert (actions.dtype, valid.dtype) == (torch.float32, torch.bool)
    for row, frame in enumerate(order):
        episode, step = places[frame]
        assert obs.state[row].tolist() == [episode, step, 0.5]
        assert obs.instructions[row] == f"do task {episode % 2}"
        image, tolerance = obs.images["agentview"][row], 2 if videos else 0
        assert image.int().min() >= level(episode, step) - tolerance
        assert image.int().max() <= level(episode, step) + tolerance
        assert abs(255 - obs.images["wrist"][row].int() - level(episode, step)).max() <= tolerance
        steps = [min(step + c, lengths[episode] - 1) for c in range(3)]
        assert actions[row, :, 1].tolist() == pytest.approx([episode + s / 100 for s in steps])
        assert valid[row].tolist() == [step + c < lengths[episode] for c in range(3)]


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), chunk=st.integers(1, 12))
def test_chunks_stay_within_their_episode(lengths: list[int], chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        read = Demonstrations(data_set(Path(folder), lengths, videos=False), chunk=chunk)
        obs, actions, valid = read.sample(range(read.num_frames))
        remaining = torch.tensor([lengths[int(e)] for e in obs.state[:, 0]]) - obs.state[:, 1].long()
        assert torch.equal(valid.sum(1), remaining.clamp(max=chunk))
        assert torch.equal(actions[..., 0].floor().long(), obs.state[:, :1].long().expand(-1, chunk))
        assert int(valid[:, 0].sum()) == sum(lengths)


@pytest.mark.parametrize("videos", [True, False])
def test_no_chunk_begins_at_a_disturbed_frame_or_goes_beyond_one(tmp_path: Path, videos: bool) -> None:
    put(tmp_path, 0, 8, disturbed=[3, 4], videos=videos)
    put(tmp_path, 2, 5, disturbed=[0, 4], videos=videos)
    put(tmp_path, 4, 2, disturbed=[0, 1], videos=videos)
    put(tmp_path, 6, 3, disturbed=[], videos=videos)
    writer.append(tmp_path, staged(tmp_path), shapes(videos=videos, disturbed=True), robot_type="test")
    read = Demonstrations(tmp_path, chunk=3)
    assert (read.num_frames, len(read)) == (12, 12)
    obs, actions, valid = read.sample(range(12))
    begun = [(0, s) for s in (0, 1, 2, 5, 6, 7)] + [(2, s) for s in (1, 2, 3)] + [(6, s) for s in (0, 1, 2)]
    assert obs.state[:, :2].tolist() == [list(map(float, place)) for place in begun]
    assert obs.images["agentview"][:, 0, 0, 0].tolist() == pytest.approx([level(*place) for place in begun], abs=2)
    assert valid.sum(1).tolist() == [3, 2, 1, 3, 2, 1, 3, 2, 1, 3, 2, 1]
    assert actions[1, :, 0].tolist() == pytest.approx([0.01, 0.02, 0.02]), "never what answers the disturbance"
    assert read.rows.tolist() == [0, 1, 2, 5, 6, 7, 9, 10, 11, 15, 16, 17]
    assert read.first_frames.tolist() == [0, 6, 9]
    assert read.action_statistics["max"] == pytest.approx([6.02] * 2)


@settings(max_examples=15)
@given(marks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4), chunk=st.integers(1, 6))
def test_every_undisturbed_frame_is_there_with_what_follows(marks: list[list[bool]], chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, marked in enumerate(marks):
            put(Path(folder), 2 * number, len(marked), videos=False, disturbed=np.flatnonzero(marked).tolist())
        writer.append(Path(folder), staged(Path(folder)), shapes(videos=False, disturbed=True), robot_type="test")
        if all(map(all, marks)):
            with pytest.raises(UserError, match=r"all \d+ frames are disturbed.*leave more steps between bursts"):
                Demonstrations(folder, chunk=chunk)
            return
        read = Demonstrations(folder, chunk=chunk)
        assert read.num_episodes == sum(not all(marked) for marked in marks)
        expected = [
            ([float(2 * e), float(s)], [not any(marked[s : s + c + 1]) and s + c < len(marked) for c in range(chunk)])
            for e, marked in enumerate(marks)
            for s in range(len(marked))
            if not marked[s]
        ]
        obs, _, valid = read.sample(range(read.num_frames))
        assert list(zip(obs.state[:, :2].tolist(), valid.tolist(), strict=True)) == expected


def test_action_statistics_by_hand(tmp_path: Path) -> None:
    found = Demonstrations(data_set(tmp_path, [2, 3], videos=False), chunk=1).action_statistics
    values = np.array([0.0, 0.01, 1.0, 1.01, 1.02])
    assert found["min"] == [0, 0] and found["max"] == pytest.approx([1.02] * 2)
    assert found["mean"] == pytest.approx([0.608] * 2) and found["std"] == pytest.approx([values.std()] * 2)
    assert found["q01"] == pytest.approx([0.0004] * 2)  # 0.04 of the way from 0 to 0.01
    assert found["q99"] == pytest.approx([1.0196] * 2)  # 0.96 of the way from 1.01 to 1.02


def test_failures_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    data_set(tmp_path, [3, 2, 4], failures=[2])
    assert Demonstrations(tmp_path, chunk=2).sample(range(5))[0].state[:, 0].tolist() == [0, 0, 0, 1, 1]
    everything = Demonstrations(tmp_path, chunk=2, successes_only=False)
    assert everything.sample(range(9))[0].state[:, 0].tolist() == [0, 0, 0, 2, 2, 2, 2, 1, 1]
    data_set(tmp_path / "bad", [3], failures=[0])
    with pytest.raises(UserError, match="all its 1 episodes failed"):
        Demonstrations(tmp_path / "bad", chunk=1)


def _open(path: Path) -> int:
    return int(Demonstrations(path, chunk=1).sample([3])[0].images["wrist"][0, 0, 0, 0])


def test_several_processes_may_decode_at_once(tmp_path: Path) -> None:
    data_set(tmp_path, [6, 5])
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_open, [tmp_path] * 3) == [pytest.approx(255 - level(0, 3), abs=2)] * 3


def test_the_decoded_images_follow_the_files(tmp_path: Path) -> None:
    data_set(tmp_path, [3])
    reports: list[str] = []
    for _ in range(2):
        Demonstrations(tmp_path, chunk=1, report=lambda what, done, total: reports.append(what))
    once = len(reports)
    assert set(reports) == {"decoding observation.images.agentview", "decoding observation.images.wrist"}
    shutil.rmtree(tmp_path / ".staging")
    put(tmp_path, 2, 2)
    data_set(tmp_path, [])
    assert Demonstrations(tmp_path, chunk=1, report=lambda *it: reports.append(it[0])).num_frames == 5
    assert len(reports) > once
    assert len([p for p in (tmp_path / CACHE).iterdir() if p.is_dir()]) == 1


def test_cameras_of_others_are_renamed(tmp_path: Path) -> None:
    data_set(tmp_path, [3])
    read = Demonstrations(tmp_path, chunk=1, cameras={"front": "observation.images.wrist"})
    assert list(read.cameras) == ["front"]
    assert read.sample([0])[0].images["front"][0, 0, 0, 0] == pytest.approx(255, abs=2)
    with pytest.raises(UserError, match=r"no images 'observation.images.wrst' for the camera 'front'.*Did you mean"):
        Demonstrations(tmp_path, chunk=1, cameras={"front": "observation.images.wrst"})


def test_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Demonstrations(tmp_path / "nowhere", chunk=1)
    with pytest.raises(UserError, match=r"not a LeRobot data set: it has no meta/info.json"):
        Demonstrations(tmp_path, chunk=1)
    put(tmp_path, 0, 3)
    with pytest.raises(UserError, match="the collection is not finished; repeat its task=collect command"):
        Demonstrations(tmp_path, chunk=1)


@pytest.mark.parametrize(
    ("version", "advice"),
    [("v2.1", "convert_dataset_v21_to_v30"), ("v2.0", "first to v2.1"), ("v4.0", "newer release of this package")],
)
def test_other_versions_say_how_to_convert(tmp_path: Path, version: str, advice: str) -> None:
    data_set(tmp_path, [3], videos=False)
    path = tmp_path / metadata.INFO
    path.write_text(json.dumps(json.loads(path.read_text()) | {"codebase_version": version}))
    with pytest.raises(UserError, match=f"LeRobot format {version}, expected v3.0.*{advice}"):
        Demonstrations(tmp_path, chunk=1)


def test_missing_features_are_named(tmp_path: Path) -> None:
    data_set(tmp_path, [3], videos=False)
    path = tmp_path / metadata.INFO
    info = json.loads(path.read_text())
    info["features"]["state"] = info["features"].pop("observation.state")
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"has no feature 'observation.state' for the state"):
        Demonstrations(tmp_path, chunk=1)


def test_damage_is_reported_with_the_file(tmp_path: Path) -> None:
    data_set(tmp_path, [30])
    good = tmp_path / "good"
    shutil.copytree(tmp_path, good, ignore=shutil.ignore_patterns("good"))
    clip = tmp_path / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    clip.write_bytes(clip.read_bytes()[:200])
    with pytest.raises(UserError, match=r"wrist/chunk-000/file-000.mp4: not a readable video.*is damaged"):
        Demonstrations(tmp_path, chunk=1)
    clip.unlink()
    with pytest.raises(UserError, match=r"file-000.mp4: cannot be read \(no such file\)"):
        Demonstrations(tmp_path, chunk=1)
    table = good / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(table).slice(0, 20), table)
    with pytest.raises(UserError, match=r"20 of 30 frames are there"):
        Demonstrations(good, chunk=1)
    table.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"file-000.parquet: cannot be read"):
        Demonstrations(good, chunk=1)
    (good / metadata.INFO).write_text("{")
    with pytest.raises(UserError, match=r"info.json: cannot be read"):
        Demonstrations(good, chunk=1)


def test_a_video_that_is_too_short_is_noticed(tmp_path: Path) -> None:
    data_set(tmp_path / "short", [4])
    data_set(tmp_path / "long", [6])
    name = "videos/observation.images.wrist/chunk-000/file-000.mp4"
    shutil.copy(tmp_path / "short" / name, tmp_path / "long" / name)
    with pytest.raises(UserError, match=r"wrist lacks 2 of 6 frames, the first is 4"):
        Demonstrations(tmp_path / "long", chunk=1)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    data_set(tmp_path, [3], videos=False)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    column = pa.array([[float("nan"), 0.0]] * 3, type=table.schema.field("action").type)
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", column), path)
    with pytest.raises(UserError, match="action has numbers that are NaN or infinite"):
        Demonstrations(tmp_path, chunk=1)


def test_several_data_sets_are_one(tmp_path: Path) -> None:
    first, second = record(tmp_path / "a", [1, 70], image_size=16), record(tmp_path / "b", [130], image_size=16)
    parts = [Demonstrations(first, chunk=3), Demonstrations(second, chunk=3)]
    both, n = Aggregate(parts), parts[0].num_frames
    assert (both.num_frames, both.num_episodes) == (n + parts[1].num_frames, 3)
    frames = [n + 1, 0, n - 1, n, 2]  # out of order, and at the border
    obs, actions, valid = both.sample(torch.tensor(frames))
    for place, frame in enumerate(frames):
        part, own = (parts[1], frame - n) if frame >= n else (parts[0], frame)
        one, action, real = part.sample([own])
        assert torch.equal(obs.images["agentview"][place], one.images["agentview"][0])
        assert torch.equal(obs.state[place], one.state[0])
        assert torch.equal(actions[place], action[0]) and torch.equal(valid[place], real[0])
        assert (obs.instructions[place], obs.env_ids[place]) == (one.instructions[0], one.env_ids[0])
    everything = np.concatenate([part.actions for part in parts])
    assert both.action_statistics["mean"] == pytest.approx(everything.mean(0).tolist())
    assert both.action_statistics["max"] == pytest.approx(everything.max(0).tolist())


def test_data_sets_recorded_otherwise_are_no_part_of_one(tmp_path: Path) -> None:
    parts = [Demonstrations(record(tmp_path / str(size), [1], image_size=size), chunk=3) for size in (16, 32)]
    with pytest.raises(UserError, match=r"the data sets differ in \(state, actions, cameras\)"):
        Aggregate(parts)
