"""Measuring a run's layouts, ``plan --measure``, and ``cluster.component_placement=auto``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from embodied_rl.cli import main
from embodied_rl.command_line import checked
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.launch import make_backend, run
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.tasks.embodied import layouts, pilot
from embodied_rl.tasks.embodied.forecast import FREE, Cost, Layout, UnitCosts
from embodied_rl.tasks.planning import plan_of
from tests.configs import embodied
from tests.logged import metrics_of, repeatable

AUTO = "cluster.component_placement=auto"
COSTS = UnitCosts(
    chunk=FREE,
    chunk_env=Cost(1.0, 0.0),
    crowd=1,
    alone=1.0,
    reset=FREE,
    decisions=[(1, Cost(2.0, 0.0)), (64, Cost(2.0, 0.0))],
    turn=FREE,
    turn_lane=FREE,
    latency=0.0,
    calls=0.0,
    updates={(threads, 32): Cost(0.1 / threads, 0.1) for threads in (1, 2, 4)},
    sync=0.0,
)
"""Of a run in which envs take 1 s a chunk each, and a second actor thread helps."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that nobody relies on."""
    monkeypatch.setattr(pilot, "BUDGET_S", 0.01)
    monkeypatch.setattr(layouts, "usable_cores", lambda: 1.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four cores, and costs that nobody has to measure."""
    monkeypatch.setattr(layouts, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(layouts, "measured", lambda *arguments: COSTS)
    return monkeypatch


def small(directory: Path, *overrides: str) -> EmbodiedConfig:
    return embodied(
        "env=dummy",
        "algorithm=grpo",
        "algorithm.group_size=4",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=16",
        "env.eval.total_num_envs=8",
        "env.eval.video_cfg.save_video=false",
        *(() if "algorithm=sac" in overrides else ("actor.micro_batch_size=32",)),
        "runner.eval_at_end=false",
        "runner.report=false",
        "runner.logger.logger_backends=[jsonl]",
        f"runner.output_dir={directory}",
        *overrides,
    )


@pytest.mark.usefixtures("machine")
def test_layouts_are_those_that_the_rules_allow(tmp_path: Path) -> None:
    """16 envs in groups of 4, which are not split: up to 4 lanes; 8 envs of an evaluation in as many."""
    plan = plan_of(small(tmp_path))
    found = list(layouts.layouts(plan, apart=True, sizes=False))
    assert found[0] == layouts.present(plan)
    places = {(one.serial, one.env_workers, one.stages) for one in found}
    assert places == {(False, 1, 1), (False, 1, 2), (False, 2, 1), (False, 2, 2), (False, 4, 1), (True, 1, 1)}
    assert {one.actor_threads for one in found} == {1, 2, 4}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ((), 0.0),
        (("rollout.max_staleness=2",), 1.0),
        (("rollout.max_staleness=1", "rollout.chunks_ahead=1"), 0.25),
        (("rollout.max_staleness=1", "rollout.chunks_ahead=1", "algorithm.rollout_epoch=2"), 0.125),
        (("rollout.max_staleness=1", "rollout.chunks_ahead=9"), 1.0),
    ],
)
def test_the_share_of_rollouts_that_runs_ahead(tmp_path: Path, overrides: Sequence[str], share: float) -> None:
    """Of four chunks a rollout epoch."""
    assert layouts.step_shape(plan_of(small(tmp_path, "cluster=process", *overrides))).runs_ahead == share


@pytest.mark.usefixtures("machine")
def test_the_fastest_that_fits_is_first(tmp_path: Path) -> None:
    """4 chunks of 4 steps. Two workers of two stages wait for envs alone: 4 x 2 x 4 + 2 s; four of one stage take
    turns: 4 x (4 + 2)."""
    plan = plan_of(small(tmp_path, "model.num_action_chunks=4"))
    ranked = layouts.compared(plan, list(layouts.layouts(plan, apart=True, sizes=False)), COSTS)
    best = ranked[0]
    assert (best.layout.env_workers, best.layout.stages, best.layout.actor_threads) == (4, 1, 4)
    assert best.forecast.rollout == 24.0
    second = next(one for one in ranked if one.layout.env_workers == 2 and one.layout.stages == 2)
    assert second.forecast.rollout == 34.0
    assert all(one.fits for one in ranked)
    tight = replace(plan, config=replace(plan.config, cluster=replace(plan.config.cluster, memory_limit=1.7)))
    ranked = layouts.compared(tight, list(layouts.layouts(tight, apart=True, sizes=False)), COSTS)
    assert ranked[0].layout.env_workers < 4, "four env workers and three others hold 0.3 GiB each"
    assert not ranked[-1].fits


@pytest.mark.usefixtures("short")
def test_costs_are_measured_in_one_process(tmp_path: Path) -> None:
    plan = plan_of(small(tmp_path, "cluster=serial", "algorithm.update_epoch=2"))
    found = list(layouts.layouts(plan, apart=False, sizes=True))
    costs = layouts.measured(plan, found, make_backend, lambda text: None)
    assert {rows for rows, _ in costs.decisions} >= {16}
    assert {size for _, size in costs.updates} >= {16, 32}
    parts = (costs.chunk + costs.chunk_env, costs.reset, costs.decisions[0][1], *costs.updates.values())
    assert all(0 < cost.wall < 10 for cost in parts)
    assert costs.sync > 0


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "learner",
    [
        ("algorithm=ppo", "env.train.auto_reset=true"),
        pytest.param(("algorithm=sac", "model=sac_mlp", "algorithm.replay.update_to_data=0.2"), marks=pytest.mark.slow),
    ],
)
def test_other_learners_are_measured(tmp_path: Path, learner: Sequence[str]) -> None:
    plan = plan_of(small(tmp_path, *learner, "cluster=serial"))
    found = list(layouts.layouts(plan, apart=False, sizes=False))
    assert all(cost.wall > 0 for cost in layouts.measured(plan, found, make_backend, print).updates.values())


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_the_command_prints_a_table_and_the_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(pilot, "BUDGET_S", 0.01)  # of this process alone
    monkeypatch.setattr(layouts, "usable_cores", lambda: 2.0)
    sizes = ("env.train.total_num_envs=16", "env.train.max_episode_steps=16", "cluster.num_threads.actor=1")
    given = ["experiment=dummy_grpo", f"cluster={backend}", *sizes, f"runner.output_dir={tmp_path}"]
    main(["plan", "--measure", *given])
    shown = capsys.readouterr().out
    rows = set(re.findall(r"^ +(serial|\d+) +(\d+) +\d+ ", shown, re.MULTILINE))
    processes = {("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")}
    assert rows == ({("serial", "1"), *processes} if backend == "process" else {("serial", "1"), ("serial", "2")})
    command = shlex.split(shown.splitlines()[-1])
    assert command[:3] == ["python", "train.py", "experiment=dummy_grpo"]
    keys = [text.partition("=")[0] for text in command[2:]]
    assert len(keys) == len(set(keys)), "it replaces what was given"
    fastest = layouts.present(plan_of(checked(command[2:])))  # type: ignore[arg-type]
    assert (str(fastest.env_workers), str(fastest.stages)) in rows or fastest.serial
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_a_run_resumes_in_the_layout_that_was_chosen(
    tmp_path: Path, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, "cluster=serial", AUTO, "runner.max_steps=1")
    chosen = Layout(serial=True, env_workers=2, stages=2, actor_threads=2, micro_batch=32)
    machine.setattr(layouts, "layouts", lambda *_, **__: [chosen])
    directory = run(config)
    written = yaml.safe_load((directory / "config.yaml").read_text())
    assert written["cluster"]["component_placement"] == {"actor": "0", "rollout": "0", "env": "0-1"}
    assert (written["rollout"]["pipeline_stage_num"], written["cluster"]["num_threads"]["actor"]) == (2, 2)
    assert "cluster.component_placement=auto: in one process, 2 stage(s)" in " ".join(capsys.readouterr().out.split())

    machine.setattr(layouts, "measured", lambda *_: pytest.fail("measured again"))
    resumed = run(small(tmp_path, "cluster=serial", AUTO, "runner.max_steps=2", "runner.resume_dir=auto"))
    assert resumed == directory
    shown = capsys.readouterr().out
    assert "runner.max_steps" in shown and "component_placement" not in shown, "what changed since the checkpoint"
    given = ("cluster.component_placement.env=0-1", "cluster.num_threads.actor=2", "rollout.pipeline_stage_num=2")
    whole = run(small(tmp_path / "whole", "cluster=serial", *given, "runner.max_steps=2"))
    assert [repeatable(line) for line in metrics_of(directory)] == [repeatable(line) for line in metrics_of(whole)]


def test_a_resumed_run_that_no_longer_fits_says_so(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    chosen = Layout(serial=True, env_workers=2, stages=2, actor_threads=2, micro_batch=32)
    machine.setattr(layouts, "layouts", lambda *_, **__: [chosen])
    run(small(tmp_path, "cluster=serial", AUTO, "runner.max_steps=1"))
    with pytest.raises(ConfigError, match=r"auto, which keeps what .*config.yaml has: env.train.total_num_envs: got 6"):
        plan_of(
            small(
                tmp_path,
                "cluster=serial",
                AUTO,
                "runner.resume_dir=auto",
                "env.train.total_num_envs=6",
                "algorithm.group_size=3",
            )
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=math"], r"cluster.component_placement: got auto, .* with task=math; expected ranks"),
        (["experiment=dummy_grpo", "cluster=ray"], "with cluster=ray; expected ranks"),
        (
            ["experiment=dummy_grpo", "rollout.pipeline_stage_num=2"],
            "component_placement=auto chooses it; leave it out",
        ),
        (["experiment=dummy_grpo", "cluster.num_threads.actor=2"], "component_placement=auto chooses it; leave it out"),
    ],
)
def test_auto_is_refused_where_it_means_nothing(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked([*overrides, AUTO])


def test_auto_chooses_for_no_evaluation() -> None:
    with pytest.raises(ConfigError, match="got auto for an evaluation"):
        plan_of(checked(["experiment=dummy_grpo", AUTO, "runner.only_eval=true"]))


@pytest.mark.parametrize("overrides", [["task=math"], ["experiment=dummy_grpo", "runner.only_eval=true"]])
def test_only_training_in_simulators_is_measured(overrides: list[str]) -> None:
    from embodied_rl.commands.plan import main as plan

    with pytest.raises(UserError, match=f"plan --measure: got {overrides[-1]}, expected training of task=embodied"):
        plan(["--measure", *overrides])


def test_the_pilot_of_a_staggered_run_plays_whole_episodes() -> None:
    config = checked(["experiment=pendulum_ppo"])
    assert isinstance(config, EmbodiedConfig) and config.env.train.stagger
    train = pilot.pilot_config(config, 2).env.train
    assert (train.auto_reset, train.stagger) == (False, False)
