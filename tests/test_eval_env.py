"""An env of its own for evaluations: other tasks, suites, cameras or rewards than those of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied_rl.command_line import checked
from embodied_rl.commands.plan import arithmetic_lines
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import run
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.planning import plan_of
from tests.configs import embodied
from tests.demonstrations.recording import record
from tests.test_end_to_end import metrics_of, only_run

TRAINED, HELD_OUT = [0, 1], [2, 3]


OTHER = (
    "eval_env=dummy",
    f"eval_env.task_ids={HELD_OUT}",
    "eval_env.reward_coef=3.0",
    "eval_env.init_params.success_radius=0.3",
    "eval_env.eval={total_num_envs: 4, max_episode_steps: 8, episodes_per_task: 3}",
    "eval_env.eval.video_cfg.save_video=false",
)


def split_run(directory: Path, *overrides: str, other: Sequence[str] = OTHER) -> EmbodiedConfig:
    """Training on two of the dummy env's tasks, evaluation on the other two, of another size and reward."""
    return embodied(
        *other,
        "env=dummy",
        f"env.task_ids={TRAINED}",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=16",
        f"runner.output_dir={directory / 'results'}",
        "runner.max_steps=2",
        "cluster.num_threads.actor=1",
        "runner.logger.logger_backends=[jsonl]",
        *overrides,
    )


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(run_dir.glob("eval_step_*/eval.json"))]


def without_time(evaluation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in evaluation.items() if key not in ("timing", "meta")}


def tasks_of(evaluation: dict[str, Any]) -> list[int]:
    return [row["task_id"] for row in evaluation["per_task"]]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_other_tasks_are_evaluated_than_those_trained_on(tmp_path: Path, backend: str) -> None:
    config = split_run(tmp_path, f"cluster={backend}", "runner.val_before_train=true", "runner.val_check_interval=1")
    run(config)
    lines = metrics_of(only_run(config))
    trained = {int(key.split("/")[1][:2]) for line in lines for key in line if key.startswith("env_task/")}
    assert trained == set(TRAINED)
    found = evaluations(only_run(config))
    assert len(found) == 3
    for evaluation in found:
        assert tasks_of(evaluation) == HELD_OUT
        assert [row["n_episodes"] for row in evaluation["per_task"]] == [3, 3]
        meta = evaluation["meta"]
        assert (meta["task_ids"], meta["max_episode_steps"], meta["episodes_per_task"]) == (HELD_OUT, 8, 3)
        assert (meta["reward_coef"], meta["init_params"]["success_radius"]) == (3.0, 0.3)


def test_training_is_what_it_is_without(tmp_path: Path) -> None:
    """Neither its trajectories nor its weights depend on what is evaluated."""
    shared = ("cluster=serial", "runner.eval_at_end=false")
    split = split_run(tmp_path / "split", *shared)
    plain = split_run(tmp_path / "plain", *shared, other=())
    assert plain.eval_env is None
    for config in (split, plain):
        run(config)
    assert metrics_of(only_run(split)) == metrics_of(only_run(plain))


@pytest.mark.parametrize("auto_reset", [False, True])
def test_an_evaluation_of_the_checkpoint_is_that_of_the_run(tmp_path: Path, auto_reset: bool) -> None:
    """Also with episodes that go on over training steps, which no evaluation may touch."""
    extra = ("env.train.auto_reset=true", "algorithm=ppo") if auto_reset else ()
    config = split_run(tmp_path, "cluster=serial", *extra)
    run(config)
    [during] = evaluations(only_run(config))
    again = split_run(
        tmp_path / "again", "cluster=serial", *extra, "runner.only_eval=true", f"runner.resume_dir={only_run(config)}"
    )
    run(again)
    [after] = evaluations(only_run(again))
    assert without_time(after) == without_time(during)


def test_a_run_goes_on_with_another_one(tmp_path: Path) -> None:
    first = split_run(tmp_path, "cluster=serial", "runner.max_steps=1")
    run(first)
    second = split_run(tmp_path, "cluster=serial", f"runner.resume_dir={only_run(first)}", "eval_env.task_ids=[3]")
    run(second)
    assert [tasks_of(evaluation) for evaluation in evaluations(only_run(first))] == [HELD_OUT, [3]]


def test_a_run_from_before_it_existed_goes_on(tmp_path: Path) -> None:
    shared = ("cluster=serial", "runner.eval_at_end=false")
    first = split_run(tmp_path, *shared, "runner.max_steps=1", other=())
    run(first)
    saved = only_run(first) / "config.yaml"
    saved.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(saved.read_text()).items() if k != "eval_env"}))
    run(split_run(tmp_path, *shared, f"runner.resume_dir={only_run(first)}", other=()))
    assert [line["step"] for line in metrics_of(only_run(first))] == [1, 2]


def test_imitation_is_evaluated_there_too(tmp_path: Path) -> None:
    config = embodied(
        "task=sft",
        "env=dummy",
        f"data.path={record(tmp_path / 'data', range(10, 256, 16))}",
        "eval_env=dummy",
        f"eval_env.task_ids={HELD_OUT}",
        "eval_env.eval={total_num_envs: 4, max_episode_steps: 8, episodes_per_task: 3}",
        "eval_env.eval.video_cfg.save_video=false",
        "cluster=serial",
        "cluster.num_threads.actor=1",
        f"runner.output_dir={tmp_path / 'results'}",
        "runner.max_steps=2",
        "runner.logger.logger_backends=[jsonl]",
    )
    run(config)
    [evaluation] = evaluations(only_run(config))
    assert tasks_of(evaluation) == HELD_OUT


def test_the_training_env_chooses_the_model() -> None:
    for env, eval_env in (("dummy", "libero_10"), ("libero_spatial", "libero_10"), ("libero_10", "libero_spatial")):
        config = embodied(f"env={env}", f"eval_env={eval_env}")
        assert config.model == embodied(f"env={env}").model
        assert config.env == embodied(f"env={env}").env
        alone = embodied(f"env={eval_env}", "model=tiny_vla").env
        assert replace(config.evaluated, init_params={}) == replace(alone, init_params={})


def test_what_both_simulators_know_holds_for_both() -> None:
    """A policy gets the pictures that it learned from, whoever chose them, unless the user says otherwise."""
    two = ("env=libero_spatial", "eval_env=libero_10", "model=libero_spatial_vla", "env.init_params.camera_widths=64")
    assert embodied(*two).evaluated.init_params == {
        "task_suite_name": "libero_10",
        "max_cached_scenes": 6,
        "draft": True,
        "camera_widths": 64,
    }
    assert embodied(*two, "eval_env.init_params.draft=false").evaluated.init_params["draft"] is False
    assert embodied("env=libero_10", "eval_env=robosuite_lift").evaluated.init_params == {"task": "Lift"}


def test_an_id_of_ones_own_is_evaluated_too() -> None:
    own = ("env=gymnasium", "env.init_params.id=Acrobot-v1", "eval_env=gymnasium")
    assert embodied(*own, "eval_env.init_params.success_return=-100").evaluated.init_params == {
        "id": "Acrobot-v1",
        "success_return": -100,
    }
    assert embodied(*own, "eval_env.init_params.id=CartPole-v1").evaluated.init_params["id"] == "CartPole-v1"


def test_an_experiment_may_choose_it(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /env: libero_spatial\n  - override /env@eval_env: libero_10\n"
        "  - _self_\neval_env: {task_ids: [7]}\n"
    )
    config = embodied(f"--config-dir={tmp_path}", "experiment=mine")
    assert (config.env.name, config.evaluated.name, config.evaluated.task_ids) == ("libero_spatial", "libero_10", [7])


def test_the_plan_says_what_is_evaluated() -> None:
    lines = arithmetic_lines(plan_of(embodied("env=libero_spatial", "eval_env=libero_10")))
    assert "an evaluation: 1 episode(s) of each task of libero_10, of at most 300 steps, 8 at once" in lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval_env=libero_1"], "eval_env=libero_1: no such choice.*libero_10"),
        (["eval_env.task_ids=[1]"], "eval_env: its keys need an env to belong to"),
        (["eval_env.init_params.success_radius=1"], "eval_env: its keys need an env to belong to"),
        (["eval_env=dummy", "eval_env.init_params.success_radios=1"], "eval_env.init_params.success_radios"),
        (["eval_env=dummy", "eval_env.train.total_num_envs=4"], "eval_env.train.total_num_envs: .* would not read it"),
        (["eval_env=dummy", "env.eval.total_num_envs=4"], "env.eval.total_num_envs: .* eval_env is evaluated"),
        (["eval_env=dummy", "eval_env.eval.total_num_envs=5"], "eval_env.eval.total_num_envs: got 5"),
        (["eval_env=dummy", "eval_env.env_type=nothing"], "nothing"),
        (["task=math", "eval_env=dummy"], "task=math has no eval_env"),
        (["task=collect", "env=dummy", "eval_env=dummy"], "task=collect has no eval_env"),
    ],
)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(["env=dummy", *overrides] if "task=math" not in overrides else overrides)


def test_a_policy_must_fit_both(tmp_path: Path) -> None:
    config = split_run(tmp_path, "cluster=serial", "eval_env.init_params.image_size=8")
    with pytest.raises(UserError, match=r"eval_env=dummy takes .* cameras agentview 8 x 8; env=dummy, .* cameras none"):
        run(config)


@pytest.mark.slow
def test_one_suite_of_libero_is_trained_on_and_another_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("libero", reason="the libero extra is not installed")
    config = embodied(
        "env=libero_spatial",
        "env.task_ids=[0]",
        "env.init_params.reward=progress",
        "env.init_params.draft=true",
        "eval_env.init_params.draft=true",
        "env.train.total_num_envs=2",
        "env.train.max_episode_steps=8",
        "algorithm.group_size=2",
        "eval_env=libero_10",
        "eval_env.task_ids=[5]",
        "eval_env.eval={total_num_envs: 1, max_episode_steps: 8}",
        "eval_env.eval.video_cfg={video_base_dir: " + str(tmp_path / "videos") + "}",
        "cluster=serial",
        "cluster.component_placement.env=0",
        "rollout.pipeline_stage_num=1",
        "cluster.num_threads.actor=1",
        "runner.max_steps=1",
        f"runner.output_dir={tmp_path / 'results'}",
        "runner.logger.logger_backends=[jsonl]",
    )
    run(config)
    [evaluation] = evaluations(only_run(config))
    assert (evaluation["meta"]["env"], tasks_of(evaluation)) == ("libero_10", [5])
    assert "mug" in evaluation["per_task"][0]["instruction"] or "book" in evaluation["per_task"][0]["instruction"]
    assert len(list((tmp_path / "videos").rglob("*.mp4"))) == 1
