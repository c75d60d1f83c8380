"""The last lines of a run: what it reached, where its checkpoints are, and what comes next."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl.launch import carry_out, run
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.reporting import end_of
from tests.configs import config_of, tiny_math_run, tiny_run
from tests.test_end_to_end import only_run

REPOSITORY = Path(__file__).parents[2]
EVALUATED = ("cluster=serial", "runner.val_before_train=true", "runner.val_check_interval=1", "runner.max_steps=2")


def labels(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_a_run_ends_with_what_comes_next(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *EVALUATED)
    run(config)
    directory = only_run(config)
    command = ["env=dummy", "runner.experiment_name=a b", "runner.max_steps=2", "runner.resume_dir=auto"]
    lines = list(end_of(directory, config, command))
    rates = [json.loads((directory / f"eval_step_{n:06d}/eval.json").read_text())["overall"] for n in (0, 2)]
    assert lines[0].startswith(
        f"evaluated:  {rates[1]['pc_success']:.1f}% after 2 steps, {rates[0]['pc_success']:.1f}%"
    )
    assert lines[0].endswith("paired over 8")
    assert labels(lines)[:2] == ["evaluated", "checkpoint"] and lines[1].endswith("global_step_2")
    assert labels(lines)[-3:] == ["evaluate", "go on", "export"]
    words = shlex.split(lines[-2])
    assert words[2:] == [
        "python",
        "train.py",
        "env=dummy",
        "runner.experiment_name=a b",
        f"runner.resume_dir={directory}",
        "runner.max_steps=4",
    ]
    assert "runner.only_eval=true" in lines[-3] and "runner.resume_dir=auto" not in lines[-3]


def test_a_run_goes_on_with_its_reference(tmp_path: Path) -> None:
    """Of ``algorithm.kl_beta``, which is made of the weights that the run began with; without it they may be gone."""
    given = ("cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false")
    run(tiny_run(tmp_path, *given))
    command = ["env=dummy", "runner.init_from=results/imitation"]
    for beta, kept in (("0.1", True), ("0", False)):
        config = tiny_run(tmp_path, *given, f"algorithm.kl_beta={beta}")
        *_, evaluate, go_on, _ = end_of(only_run(config), config, command)
        assert ("runner.init_from=results/imitation" in shlex.split(go_on)) == kept
        assert "runner.init_from" not in evaluate


def test_folders_of_any_name_are_understood(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false")
    run(config)
    directory = only_run(config).rename(tmp_path / "my runs (1), b=it's")
    *_, evaluate, go_on, _ = end_of(directory, config, ["env=dummy"])
    for line, expected in ((evaluate, directory / "checkpoints/global_step_1"), (go_on, directory)):
        assert config_of(*shlex.split(line.partition("train.py")[2])).runner.resume_dir == str(expected)


def test_the_best_of_the_evaluated_checkpoints_is_named(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *EVALUATED)
    run(config)
    directory = only_run(config)
    for step, solved in ((1, True), (2, False)):
        path = directory / f"eval_step_{step:06d}/eval.json"
        content = json.loads(path.read_text())
        for episode in content["episodes"]:
            episode["success"] = solved
        path.write_text(json.dumps(content))
    lines = list(end_of(directory, config, []))
    assert lines[2] == f"best:       {directory}/checkpoints/global_step_1 (100.0%)"
    assert "global_step_1 " in lines[3] and "global_step_1 " in lines[-1], "it is what one evaluates and exports"


def test_a_run_without_evaluation_or_checkpoint_promises_none(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false")
    run(config)
    assert labels(list(end_of(only_run(config), config, []))) == ["checkpoint", "evaluate", "go on", "export"]
    assert labels(list(end_of(only_run(config), config, None))) == ["checkpoint", "export"], "from Python"
    nothing = tiny_run(
        tmp_path / "nothing",
        "cluster=serial",
        "runner.max_steps=1",
        "runner.save_interval=-1",
        "runner.eval_at_end=false",
    )
    run(nothing)
    assert list(end_of(only_run(nothing), nothing, [])) == []


def test_files_of_another_version_do_not_fail_a_run_that_is_done(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *EVALUATED)
    run(config)
    directory = only_run(config)
    (directory / "eval_step_000001/eval.json").write_text("{}")
    assert labels(list(end_of(directory, config, None))) == ["checkpoint", "export"]


def test_brackets_of_the_command_line_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = "runner.about='PPO [on task ${env.task_ids}]'"
    config = tiny_run(tmp_path, "cluster=serial", "runner.max_steps=1", "runner.eval_at_end=false", about)
    carry_out(plan_of(config), ["data.files=[/tmp/a.jsonl]"])
    out = capsys.readouterr().out
    assert "'data.files=[/tmp/a.jsonl]'" in out
    assert out.startswith("PPO [on task None]\n"), "what a recipe says of itself comes first"


def test_answers_are_paired_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_math_run(tmp_path, "runner.val_before_train=true")
    run(config)
    assert "after against before: the same 8 prompts" in capsys.readouterr().out
    first = next(iter(end_of(only_run(config), config, None)))
    assert first.startswith("evaluated:  ") and first.endswith("paired over 8")


@pytest.mark.slow
def test_the_commands_work(tmp_path: Path) -> None:
    """As a user runs and pastes them."""
    command = [sys.executable, "train.py", "env=dummy", "cluster=serial", "runner.max_steps=1", "experiment=dummy_grpo"]
    command += [f"runner.output_dir={tmp_path}/my results", "env.eval.video_cfg.save_video=false"]
    text = finished(command)
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in text.splitlines() if ":" in line}
    for name in ("evaluate", "go on"):
        assert lines[name].startswith("python train.py ")
        finished([sys.executable, *shlex.split(lines[name])[1:]])
    finished(
        [sys.executable, *shlex.split(lines["export"].replace("<folder>", shlex.quote(str(tmp_path / "out"))))[1:]]
    )
    assert (tmp_path / "out").is_dir()


def finished(command: list[str]) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
