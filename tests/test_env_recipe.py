"""An env that alone stands for a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import embodied_rl as er
from embodied_rl import api, cli
from embodied_rl.composition import RECIPES, config_of, with_recipe
from embodied_rl.schema import Config, EmbodiedConfig

CONFIG = Path(__file__).parents[1] / "config"


def recipe(*arguments: str) -> str | None:
    added = [text for text in with_recipe(arguments) if text not in arguments]
    assert [text for text in with_recipe(arguments) if text in arguments] == list(arguments)
    return added[0] if added else None


@pytest.mark.parametrize(
    "arguments",
    [
        "env=libero_10",
        "task=embodied env=libero_10",
        "env=libero_10 task=embodied cluster=serial logger=verbose runner.max_steps=20 runner.resume_dir=auto",
        "env=libero_10 runner.only_eval=false env.train.total_num_envs=8 env.eval.episodes_per_task=4 actor.optim.lr=1",
        "env=libero_10 --cfg job",
        "--config-dir=. env=libero_10",
    ],
)
def test_training_in_the_env_alone_is_its_recipe(arguments: str) -> None:
    assert recipe(*arguments.split()) == "experiment=libero_10_short"


@pytest.mark.parametrize(
    "arguments",
    [
        "env=libero_10 runner.only_eval=true",
        "runner.only_eval=True task=embodied env=libero_10 runner.resume_dir=auto",
        "env=libero_10 experiment=none",
        "env=libero_10 model=openvla_oft",
        "env=libero_10 model.path=/weights",
        "env=libero_10 algorithm=grpo",
        "env=libero_10 eval_env=libero_10",
        "env=libero_10 env.task_ids=null",
        "env=libero_10 env.init_params.task_suite_name=libero_10_swap",
        "env=libero_10 env.init_params={task_suite_name:libero_10_swap}",
        "env=libero_10 task=collect",
        "task=sft env=libero_10 data.path=x",
        "task=dagger env=libero_10",
        "env=libero_spatial",
        "env=dummy eval_env=libero_10",
        "env=libero_10,dummy --multirun",
        "experiment=libero_10_ppo",
        "",
    ],
)
def test_whoever_says_what_is_trained_or_played_gets_that(arguments: str) -> None:
    assert recipe(*arguments.split()) is None


def test_a_run_goes_on_with_its_own_tasks(tmp_path: Path) -> None:
    """By its path and as the newest one: the recipe's runs and those of all tasks have the env's name."""
    start = ["env=libero_10", f"runner.output_dir={tmp_path}"]
    assert recipe(*start, "runner.resume_dir=auto") == "experiment=libero_10_short", "there is none yet"
    for number, (tasks, added) in enumerate([([3], "experiment=libero_10_short"), (None, None)], 1):
        run = tmp_path / f"embodied_libero_10/2026-01-0{number}_00-00-00"
        checkpoint = run / "checkpoints/global_step_1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").touch()
        (run / "config.yaml").write_text(json.dumps({"env": {"task_ids": tasks}}))
        for named in ("auto", run, checkpoint):
            assert recipe(*start, f"runner.resume_dir={named}") == added
    assert recipe(*start, "runner.resume_dir=/nowhere") == "experiment=libero_10_short", "the run itself says so"


@pytest.mark.parametrize("ranks", ["0", "0-1", "0-3"])
def test_it_is_played_by_one_two_or_four_env_workers(ranks: str) -> None:
    assert config_of("experiment=libero_10_short", f"cluster.component_placement.env={ranks}").runner.max_steps == 10


def test_evaluated_states_stay_out_of_training_however_many_there_are() -> None:
    config = config_of("experiment=libero_10_short", "env.eval.episodes_per_task=40")
    assert isinstance(config, EmbodiedConfig)
    assert config.env.train.skip_states == 40


def test_runs_from_the_command_line_and_from_python_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Config, list[str]]] = []
    monkeypatch.setattr(cli, "_run", lambda config, command: begun.append((config, list(command))))
    monkeypatch.setattr(api, "_carried_out", lambda config, command, *_: begun.append((config, list(command))))
    cli.main(["env=libero_10", "runner.max_steps=5"])
    er.train("env=libero_10", "runner.max_steps=5")
    for config, command in begun:
        assert isinstance(config, EmbodiedConfig)
        assert (config.env.task_ids, config.runner.max_steps, config.env.eval.episodes_per_task) == ([3], 5, 34)
        assert command == ["env=libero_10", "experiment=libero_10_short", "runner.max_steps=5"], (
            "what comes next says it"
        )
    cli.main(["env=libero_10", "runner.only_eval=true"])
    evaluated = begun[-1][0]
    assert isinstance(evaluated, EmbodiedConfig) and evaluated.env.task_ids is None
    assert evaluated.runner.experiment_name == begun[0][0].runner.experiment_name, "runner.resume_dir=auto finds it"


def test_plan_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "env=libero_10"])
    assert "experiment/libero_10_short" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [*RECIPES.values(), "libero_10_rl", "libero_goal_rl", "libero_short_rl", "libero_10_ppo", "libero_spatial_ppo"],
)
def test_training_never_meets_the_initial_states_of_the_evaluation(name: str) -> None:
    config = config_of(f"experiment={name}")
    assert isinstance(config, EmbodiedConfig)
    assert config.env.train.skip_states >= config.env.eval.episodes_per_task > 0
    assert config.runner.val_before_train or name not in RECIPES.values(), "there is a before, and an after"
    assert config.runner.eval_at_end
    assert name not in RECIPES.values() or "experiment=none" in str(config.runner.about)


@pytest.mark.parametrize("name", ["libero_10_rl", "libero_goal_rl"])
def test_recipes_of_a_whole_suite_have_all_tasks(name: str) -> None:
    config = config_of(f"experiment={name}")
    assert isinstance(config, EmbodiedConfig)
    assert config.env.task_ids is None and config.env.train.task_sampling == "success"
