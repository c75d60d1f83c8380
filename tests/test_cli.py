"""The command line as a user meets it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl import __version__
from embodied_rl.cli import config_of as config_of_any
from embodied_rl.cli import main
from embodied_rl.command_line import problems_of
from embodied_rl.commands import COMMANDS
from embodied_rl.commands.help import _HEAD
from embodied_rl.config import GROUPS
from tests.configs import embodied as config_of

REPOSITORY = Path(__file__).parents[1]


def train(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def test_help_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["env=libero_10", "-h"]):
        main(arguments)
        text = capsys.readouterr().out
        lines = text.splitlines()
        assert len(lines) <= 60 and max(map(len, lines)) <= 100
        listed = [name for line in lines if line.startswith(" " * 6) for name in line.strip(" ,").split(", ")]
        for group in GROUPS:
            files = (REPOSITORY / "config" / group).glob("*.yaml")
            assert {file.stem for file in files} - {"base"} <= set(listed), group
        assert "base" not in listed
        assert [name for name in COMMANDS if f"\n  {name} " not in text] == []


def test_commands_in_the_help_compose() -> None:
    shown = [line.split("train.py ")[1].split("    ")[0].split() for line in _HEAD.splitlines()[3:9]]
    assert len(shown) == 6
    for words in shown:
        config_of_any(*(word.replace("<demonstrations>", "somewhere") for word in words))


def test_commands_and_hydra_have_help_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["export", "--help"])
    assert "export <checkpoint or run directory>" in capsys.readouterr().out
    assert "== Flags ==" in train("--hydra-help").stdout


def test_every_unknown_key_gets_a_suggestion_in_one_go() -> None:
    result = train("runner.max_step=3", "algorithm.gama=0.3", "lr=3", "actor.optim.weight_decay=x")
    assert result.returncode == 2
    assert "4 problems in the configuration" in result.stderr
    for name in ("runner.max_steps", "algorithm.gamma", "actor.optim.lr"):
        assert f"Did you mean {name!r}?" in result.stderr
    assert "actor.optim.weight_decay: got 'x'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("env=libero_1O", "expected one of dummy, envpool, gymnasium, libero, libero_10, libero_90"),
        ("env=null", "to have none, choose a task that needs no env"),
        ("env.init_params.foo=1", "env.init_params has states_per_task"),
        ("model.params.hiden_size=1", "Did you mean 'model.params.hidden_size'?"),
        ("runner.resume_dir=/nowhere", "runner.resume_dir=/nowhere: no such directory"),
    ],
)
def test_a_mistake_is_one_message(argument: str, message: str, tmp_path: Path) -> None:
    result = train(argument, f"runner.output_dir={tmp_path}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir()), "nothing is left of a run that never was"


@pytest.mark.parametrize("command", [(), ("plan",), ("check-env",), ("probe",)])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("env=dummy", "actor.optim.lr=1e-3,1e-4"), "Ambiguous value"),
        (("--config-dir", "{}", "env=bad"), "a configuration file is no YAML: mapping values are not allowed here"),
        (("env=CartPole-v1",), "An id of Gymnasium is env=gymnasium env.init_params.id=CartPole-v1"),
        (("env=xyzzy",), "<folder>/env/xyzzy.yaml, is found with --config-dir <folder>"),
    ],
)
def test_a_mistake_is_one_message_to_every_command(
    command: tuple[str, ...],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/bad.yaml").write_text("name: a: b\n")
    with pytest.raises(SystemExit) as ended:
        main([*command, *(text.format(tmp_path) for text in arguments)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and message in said


@pytest.mark.parametrize(("word", "instead"), [("train", "without a command"), ("eval", "runner.only_eval=true")])
def test_commands_of_other_programs(word: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([word, "env=dummy"])
    assert instead in capsys.readouterr().err


@pytest.fixture
def own_files(tmp_path: Path) -> Path:
    """A folder of YAML of one's own, outside of the checkout: an env and an experiment."""
    for group, name, text in (
        ("env", "mine", "defaults: [dummy, _self_]\nname: mine\ntrain: {total_num_envs: 32}\n"),
        (
            "experiment",
            "ours",
            "# @package _global_\ndefaults: [{override /env: mine}, _self_]\nrunner: {max_steps: 7}\n",
        ),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)
    return tmp_path / "conf"


WAYS = ("--config-dir {}", "--config-dir={}", "-cd {}", "hydra.searchpath=[file://{}]", "hydra.searchpath=[{}]")
"""How Hydra is told of a folder."""


@pytest.mark.parametrize("way", WAYS)
def test_yaml_of_ones_own(way: str, own_files: Path) -> None:
    """The checks before a run must see what Hydra will compose."""
    place = way.format(own_files).split(" ")
    assert config_of("env=mine", *place).env.train.total_num_envs == 32
    config = config_of(*place, "experiment=ours", "env.train.total_num_envs=16")
    assert (config.runner.max_steps, config.env.name, config.env.train.total_num_envs) == (7, "mine", 16)
    assert not problems_of([*place, "env=mine", "env.train.total_num_envs=16"])
    [problem] = problems_of([*place, "env=mien"])
    assert "libero_spatial, maniskill, maniskill_bridge" in problem and "Did you mean 'mine'?" in problem
    [problem] = problems_of([*place, "env=mine", "env.train.total_num_env=16"])
    assert "Did you mean 'env.train.total_num_envs'?" in problem


def test_yaml_of_ones_own_with_a_mistake(own_files: Path) -> None:
    (own_files / "env/mine.yaml").write_text("defaults: [dummy, _self_]\ntrain: {total_num_env: 3}\n")
    [problem] = problems_of(["--config-dir", str(own_files), "env=mine"])
    assert problem == "env.train.total_num_env: no such key. Did you mean 'env.train.total_num_envs'?"


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]])
def test_a_run_with_yaml_of_ones_own(way: str, own_files: Path, tmp_path: Path) -> None:
    place = way.format(own_files).split(" ")
    run = (
        "experiment=ours",
        "cluster=serial",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
        "runner.save_interval=-1",
    )
    result = train(*place, *run, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [config] = tmp_path.glob("results/*/*/config.yaml")
    assert "name: mine" in config.read_text()


def test_hydras_short_options_are_not_taken_for_others(own_files: Path) -> None:
    for options in (["-c", "job"], ["-c", "job", "-cd", str(own_files), "env=mine"], ["-cjob"]):
        assert not problems_of([*options, "runner.max_steps=1"])


def test_help_lists_yaml_of_ones_own(own_files: Path) -> None:
    result = train("--config-dir", str(own_files), "--help")
    assert result.returncode == 0, result.stderr
    assert "mine" in result.stdout and "ours" in result.stdout


def test_a_folder_of_yaml_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    result = train("--config-dir", str(tmp_path / "none"), "env=mine")
    assert result.returncode != 0
    assert str(tmp_path / "none") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_in_a_value_is_found_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from embodied_rl.cli import main\n"
        "main(['algorithm.group_size=0', 'env=libero_10', 'cluster=serial'])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "algorithm.group_size: got 0" in result.stderr


def test_a_model_that_does_not_fit_the_env_is_one_message(tmp_path: Path) -> None:
    result = train("env=dummy", "model=tiny_vla", "cluster=serial", f"runner.output_dir={tmp_path}")
    assert result.returncode == 2
    assert "'tiny_vla' acts on camera images and this env gives none" in result.stderr
    assert "Traceback" not in result.stderr


def test_options_of_adapters_need_no_plus_and_reach_them(tmp_path: Path) -> None:
    result = train("env.init_params.states_per_task=8", "--cfg", "job")
    assert "states_per_task: 8" in result.stdout


def test_a_sweep_runs_each_job(tmp_path: Path) -> None:
    result = train(
        "-m",
        "cluster=serial",
        "actor.seed=1,2",
        "runner.max_steps=1",
        "runner.eval_at_end=false",
        "runner.save_interval=-1",
        f"runner.output_dir={tmp_path}",
    )
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("*/*/config.yaml"))) == 2


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"embodied_rl {__version__}\n"


def test_the_installed_command_sees_modules_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(
        "from embodied_rl.envs.dummy import DummyEnv\n\n\nclass Mine(DummyEnv):\n    pass\n"
    )
    as_installed = [sys.executable, "-P", "-c", "from embodied_rl.cli import main; main()"]
    command = [*as_installed, "plan", "env=dummy", "env.env_type=my_env:Mine"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
