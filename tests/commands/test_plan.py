from __future__ import annotations

from pathlib import Path

import pytest

from embodied_rl.cli import config_of, main
from embodied_rl.command_line import COMMAND_LINE, checked, origins
from embodied_rl.errors import CheckpointError, ConfigError
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.trial import count_parameters


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def test_the_arithmetic_from_groups_to_optimiser_steps(capsys: pytest.CaptureFixture[str]) -> None:
    shown = page(
        capsys,
        "env=dummy",
        "model=mlp",
        "algorithm=ppo",
        "algorithm.group_size=4",
        "algorithm.rollout_epoch=2",
        "algorithm.n_minibatches=8",
        "algorithm.update_epoch=3",
        "env.train.total_num_envs=64",
        "env.train.max_episode_steps=30",
        "model.num_action_chunks=4",
        "runner.max_steps=5",
        "rollout.max_staleness=1",
        "rollout.chunks_ahead=6",
    )
    assert "weights of a rollout: at most 1 updates old, and after its first 6 chunks the newest" in shown
    assert "32 groups x 4 in 2 rollout epochs = 128 sequences" in shown
    assert "x 8 decision(s) of 4 = at most 1024 samples" in shown
    assert "3 epoch(s) x 8 mini-batches of about 128 samples = 24 optimiser steps" in shown
    assert "5 steps = 120 optimiser steps" in shown


def test_keys_come_from_the_file_that_sets_them_last() -> None:
    found = origins(["env=libero_10", "algorithm=grpo", "runner.max_steps=7", "env.init_params.draft=true"])
    assert found.keys["runner.max_steps"] == COMMAND_LINE
    assert found.keys["env.init_params.draft"] == COMMAND_LINE
    assert found.keys["algorithm.adv_type"] == "algorithm/grpo"
    assert found.keys["env.init_params.task_suite_name"] == "env/libero_10"
    assert found.keys["env.train.skip_states"] == "env/base/common"
    assert found.keys["runner.task_type"] == "task/embodied"
    assert found.files.index("env/base/libero") < found.files.index("env/libero_10")


def test_yaml_of_ones_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/mine.yaml").write_text("defaults: [dummy, _self_]\nname: mine\n")
    found = origins([f"--config-dir={tmp_path}", "env=mine"])
    assert found.keys["env.name"] == "env/mine"
    assert found.keys["env.env_type"] == "env/dummy"


@pytest.mark.parametrize("task", ["task=math", "task=sft", "task=collect env=dummy model=mlp", "env=dummy model=mlp"])
def test_every_task_has_a_plan(capsys: pytest.CaptureFixture[str], task: str) -> None:
    shown = page(capsys, *task.split())
    assert "where each key comes from" in shown
    assert "memory of each" in shown


def test_nodes_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    groups = "+cluster.node_groups={sim: {slots: 2}, learn: {}}"
    places = ("cluster.component_placement.env=sim:0-1", "cluster.component_placement.actor,rollout=learn:0")
    shown = page(capsys, "experiment=dummy_grpo", "cluster=ray", groups, *places)
    assert "node 0 (sim, no accelerator), ranks 0-1: env 0, 1" in shown
    assert "node 1 (learn, no accelerator), ranks 2-2: actor 2; rollout 2" in shown
    assert "node 0" not in page(capsys, "experiment=dummy_grpo")


def test_parameters_are_counted_without_building_the_policy() -> None:
    shipped = count_parameters(plan_of(config_of("task=math")))
    fresh = count_parameters(plan_of(config_of("task=math", "model=tiny_lm")))
    assert shipped is not None and shipped > 1e5
    assert fresh is not None and fresh > 1e4


def test_shapes_of_an_env_give_the_size_of_its_policy() -> None:
    shipped = count_parameters(plan_of(config_of("env=libero_10")))
    assert count_parameters(plan_of(config_of("env=libero_10", "model.path=null"))) == shipped


def test_a_run_that_needs_more_memory_than_it_may_have_is_refused() -> None:
    """0.3 GiB a process: two env workers, a rollout worker, the actor."""
    words = r"memory_limit: got 1, .* at least 1.1 GiB \(actor 0.3, rollout 0.3, env 0.5\)"
    with pytest.raises(ConfigError, match=words):
        plan_of(config_of("env=dummy", "cluster.memory_limit=1"))
    plan_of(config_of("env=dummy", "cluster.memory_limit=2"))
    with pytest.raises(ConfigError, match=r"cluster.memory_limit: this run would not read it"):
        config_of("env=dummy", "cluster=serial", "cluster.memory_limit=2")


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(SystemExit) as ending:
        main(["plan", "runner.max_stepz=3"])
    assert ending.value.code == 2
    with pytest.raises(ConfigError, match=r"Did you mean 'runner\.max_steps'"):
        checked(["runner.max_stepz=3"])
    with pytest.raises(CheckpointError):
        plan_of(config_of("runner.resume_dir=nowhere"))
