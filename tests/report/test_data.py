"""What is read from a run directory, by values that are known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from embodied_rl.errors import UserError
from embodied_rl.report.data import find_run, read_run
from embodied_rl.report.facts import note_end, note_start, read_starts
from embodied_rl.report.spent import spent
from tests.commands.evaluations import completions, episodes, write
from tests.report.runs import META, ROWS, make_run


def test_metrics_by_hand(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.series("env/success_once").steps == (1, 2, 3, 4)
    assert run.series("env/success_once").values == (0.1, 0.3, 0.5, 0.7)
    assert run.series("eval/success_rate").steps == (0, 4)
    assert run.seconds() == {0: 2.0, 1: 12.0, 2: 24.0, 3: 32.0, 4: 43.0}
    assert run.env_steps() == {0: 0.0, 1: 100.0, 2: 200.0, 3: 280.0, 4: 350.0}
    assert (run.step, run.max_steps, run.state) == (4, 4, "finished after 4 steps")


def test_what_is_not_finite_is_left_out_and_counted(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.series("actor/entropy").steps == (1, 3, 4)
    assert run.gaps("actor/entropy") == 1 and run.gaps("env/success_once") == 0


def test_evaluations_by_hand(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.first and run.last
    assert (run.first.step, run.first.rate, run.first.count) == (0, 0.25, 8)
    assert (run.last.step, run.last.rate) == (4, 0.875)
    assert [(row.task, row.successes, row.rate) for row in run.last.tasks] == [(0, 4.0, 1.0), (1, 3.0, 0.75)]


def test_prompts_without_a_verified_answer_do_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", evaluated={}, changes={"runner.task_type": "math"})
    write(run / "eval_step_000004" / "eval.json", completions([[True], [False], [None], [True]]), META, "completions")
    last = read_run(run).last
    assert last and (last.count, last.rate) == (3, 2 / 3)


def test_time_by_hand(tmp_path: Path) -> None:
    found = spent(read_run(make_run(tmp_path / "run")))
    assert found is not None
    assert {part: seconds for part, seconds, _ in found.parts} == {
        "rollout": 21.0,
        "update": 13.0,
        "weight sync": 2.0,
        "rest of a step": 2.0,
        "evaluation": 5.0,
    }
    assert found.by_step["update"] == (3.0, 4.0, 3.0, 3.0)


def test_a_critic_is_part_of_the_update(tmp_path: Path) -> None:
    rows = [row | {"time/values": 0.25, "time/critic": 0.125} for row in ROWS[1:3]]
    found = spent(read_run(make_run(tmp_path / "run", rows=rows)))
    assert found is not None
    assert {part: seconds for part, seconds, _ in found.parts}["update"] == 3.0 + 4.0 + 2 * 0.375
    assert dict(found.within)["a critic's gradients and optimiser"] == 0.25


def test_pauses_by_hand(tmp_path: Path) -> None:
    gaps = ({"gap/update": 4.0, "gap/answers": 1.0, "gap/rest": 0.0}, {"gap/update": 2.0, "gap/answers": 3.0})
    rows = [row | {"perf/ideal_s": 5.0} | gap for row, gap in zip(ROWS[1:3], gaps, strict=True)]
    found = spent(read_run(make_run(tmp_path / "run", rows=rows)))
    assert found is not None and found.gap is not None
    assert found.gap.reached == 0.5
    assert found.gap.pauses == (("the actor updates", 6.0), ("envs wait for actions", 4.0))
    before = spent(read_run(make_run(tmp_path / "before")))
    assert before is not None and before.gap is None, "of an earlier version"


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[:-30])
    found = read_run(run)
    assert found.step == 4  # of its evaluation
    assert found.series("env/success_once").steps == (1, 2, 3) and not found.notes


def test_a_broken_line_in_the_middle_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "nonsense", *lines[2:]]) + "\n")
    found = read_run(run)
    assert found.series("env/success_once").steps == (2, 3, 4)
    assert len(found.notes) == 1 and "metrics.jsonl:2" in found.notes[0]


def test_an_evaluation_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "eval_step_000004" / "eval.json").write_text("{")
    found = read_run(run)
    assert list(found.evaluations) == [0] and "eval_step_000004" in found.notes[0]


def test_neither_metrics_nor_evaluations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", evaluated={})
    (run / "metrics.jsonl").unlink()
    found = read_run(run)
    assert not found.rows and found.first is None and spent(found) is None


def test_videos_are_those_that_the_evaluation_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    folder = tmp_path / "videos" / "by_hand_run"
    entries = episodes([[1, 0], [0, 0]])
    for entry, (file, tile) in zip(
        entries, [("e/a.mp4", 1), ("e/a.mp4", 0), ("e/b.mp4", 0), ("e/gone.mp4", 0)], strict=True
    ):
        entry["video"] = {"file": file, "tile": tile}
    (folder / "e").mkdir(parents=True)
    for name in ("a", "b", "other"):
        (folder / "e" / f"{name}.mp4").touch()
    write(run / "eval_step_000004" / "eval.json", entries, META)
    last = read_run(run).last
    assert last
    assert [(film.path.name, film.task, film.outcomes) for film in last.films] == [
        ("a.mp4", 0, (False, True)),
        ("b.mp4", 1, (False,)),
    ]


def test_starts_and_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", changes={"runner.max_steps": 9})
    assert read_run(run).state == "ended after 4 of 9 steps"
    note_start(run, ["task=embodied", "runner.max_steps=9"])
    found = read_run(run)
    assert found.under_way and found.state == "under way after 4 of 9 steps"
    assert found.command == ["task=embodied", "runner.max_steps=9"]
    note_end(run, "interrupted")
    note_start(run, None)
    note_end(run, "finished")
    assert [start["ending"] for start in read_starts(run)] == ["interrupted", "finished"]
    assert not read_run(run).under_way


def test_a_killed_run_is_not_under_way(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", changes={"runner.max_steps": 9})
    note_start(run, [])
    content = json.loads((run / "run.json").read_text())
    content["starts"][0]["pid"] = 2**22 + 1  # above Linux' largest
    (run / "run.json").write_text(json.dumps(content))
    assert read_run(run).state == "ended after 4 of 9 steps"


def test_no_environment_variable_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "do-not-tell-6f1c")
    run = make_run(tmp_path / "run")
    note_start(run, ["task=embodied"])
    assert "do-not-tell" not in (run / "run.json").read_text()
    assert read_starts(run)[0]["pid"] == os.getpid()


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        find_run(tmp_path / "nothing")
    with pytest.raises(UserError, match="is no run directory"):
        find_run(tmp_path)


def test_an_experiment_means_its_newest_run(tmp_path: Path) -> None:
    for name in ("2026-01-01", "2026-01-03", "2026-01-02"):
        make_run(tmp_path / "experiment" / name)
    newest = tmp_path / "experiment" / "2026-01-03"
    assert find_run(tmp_path / "experiment") == newest == find_run(newest)
    evaluation = tmp_path / "experiment" / "2026-01-04-eval"
    make_run(evaluation)
    assert find_run(tmp_path / "experiment") == newest, "it has what was trained"
    make_run(tmp_path / "evaluations" / "2026-01-04-eval")
    assert find_run(tmp_path / "evaluations") == tmp_path / "evaluations" / "2026-01-04-eval"
