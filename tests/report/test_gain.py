"""The last evaluation of a run against its first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied_rl.monitoring.console import RunConsole
from embodied_rl.report import before_after, page
from embodied_rl.report.before_after import gain, show_gain, write_videos
from embodied_rl.report.data import read_run
from tests.evaluation.test_side_by_side import filmed
from tests.evaluation.test_video import read
from tests.report.runs import AFTER, BEFORE, make_run

RED, GREEN, BLUE = (200, 30, 30), (30, 200, 30), (30, 30, 200)


def add_films(run: Path, step: int, *, states: int = 2) -> None:
    """Film the first initial states of both tasks, after training in the opposite order of tiles and files."""
    path = run / f"eval_step_{step:06d}" / "eval.json"
    content = json.loads(path.read_text())
    for task in (0, 1):
        own = [entry for entry in content["episodes"] if entry["task_id"] == task][:states]
        file = f"eval_step_{step:06d}/{task}.mp4"
        envs = list(range(len(own))) if step == 0 else list(reversed(range(len(own))))
        (run.parent / "videos/by_hand_run" / file).parent.mkdir(parents=True, exist_ok=True)
        colours = dict.fromkeys(envs, (RED, GREEN)[task] if step == 0 else BLUE)
        clips = filmed(run.parent / "videos/by_hand_run" / file, colours, dict.fromkeys(envs, 3 + step))
        for number, (env, entry) in enumerate(zip(envs, own, strict=True)):
            entry["video"] = {"file": file, "tile": env, "box": list(clips[env].box)}
            entry["init_state"] = number
    path.write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "run")
    for step in (0, 4):
        add_films(made, step)
    return made


def test_a_run_shows_its_gain_and_films_the_same_episodes_side_by_side(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paired = []
    monkeypatch.setattr(
        before_after, "write_side_by_side", lambda path, pairs: (paired.append(pairs), path.parent.mkdir(exist_ok=True))
    )
    show_gain(run, RunConsole())
    out = " ".join(capsys.readouterr().out.split())
    assert "after against before: the same 8 episodes" in out
    assert "2 tasks 25.0 87.5 5 0 +62.5 +25.0 to +87.5" in out
    assert "before_after (2, before on the left, after on the right)" in out
    headings = [[clip.heading for clip in pair] for pair in paired[0]]
    assert headings == [["state 0, before training", "state 0, after 4 steps"],
                        ["state 1, before training", "state 1, after 4 steps"]]  # fmt: skip
    for (before, after), other in zip(paired[0], reversed(paired[0]), strict=True):
        assert before.path.parent.name == "eval_step_000000" and after.path.parent.name == "eval_step_000004"
        assert before.box == other[1].box != after.box, "the tile of the same episode, wherever it stands"


def test_the_tasks_that_changed_most_are_filmed_where_there_are_too_many(run: Path) -> None:
    files, left_out = write_videos(read_run(run), most=1)
    assert [file.parent.name for file in files] == ["before_after"] and left_out == 1
    assert files[0].name.startswith("task_01_"), "0 of 2 before and 2 of 2 after; task 0 has 2 and 2"
    assert len(read(files[0])) == 7


@pytest.mark.parametrize("lost", ["box", "file", "everything"])
def test_without_videos_there_is_the_table_alone(run: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "eval_step_000000/eval.json"
    content = json.loads(path.read_text())
    for entry in content["episodes"]:
        if lost == "box" and "video" in entry:
            del entry["video"]["box"]  # of an earlier version
        elif lost == "everything":
            entry.pop("video", None)
    path.write_text(json.dumps(content))
    if lost == "file":
        for file in (run.parent / "videos/by_hand_run/eval_step_000000").iterdir():
            file.unlink()
    show_gain(run, RunConsole())
    out = capsys.readouterr().out
    assert "after against before" in out and "before_after" not in out


def test_a_video_that_cannot_be_read_fails_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next((run.parent / "videos/by_hand_run/eval_step_000000").iterdir()).write_bytes(b"no video")
    show_gain(run, RunConsole())
    assert "no comparison of the evaluations: " in capsys.readouterr().out


def test_nothing_is_said_of_one_evaluation_or_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = make_run(tmp_path / "alone", evaluated={4: AFTER})
    other = make_run(tmp_path / "other", evaluated={0: [BEFORE[0][:3], BEFORE[1]], 4: AFTER})
    for run in (alone, other):
        assert gain([read_run(run)]) is None
        show_gain(run, RunConsole())
    assert capsys.readouterr().out == ""


def test_the_curve_of_a_run_has_evaluations_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(page, "write_picture", lambda path, panels, **text: drawn.update(text, panels=panels))
    run = read_run(make_run(tmp_path / "run"))
    with pytest.raises(FileNotFoundError):  # it was to be written
        page.write_page([run], tmp_path / "page.html")
    [(axis, _, curves), _] = drawn["panels"]
    assert (axis, drawn["y"]) == ("training step", "success")
    assert {curve.name: curve.mean.y for curve in curves} == {
        "evaluation": (0.25, 0.875),
        "training rollouts": (0.1, 0.3, 0.5, 0.7),
    }
