"""Command lines that nobody can have meant: each is refused, or its run is planned; none ends in a traceback."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from embodied_rl.cli import main
from embodied_rl.command_line import checked
from embodied_rl.config import CONFIG_MODULE
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import at, flat
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.validation import build_config

BASES = ["env=dummy", "task=math", "task=sft", "task=collect env=dummy", "env=dummy algorithm=ppo cluster=serial"]
VALUES: list[Any] = [
    None,
    "",
    ":",
    "a:b",
    "../../x",
    "/dev/null",
    "\x00",
    "x" * 300,
    True,
    -1,
    0,
    10**20,
    -(10**20),
    1e300,
    float("nan"),
    float("inf"),
    [],
    [[]],
    [-1, None],
    {},
    {"": 1},
    {"a": {"b": [1]}},
]


@functools.cache
def composed(base: str) -> dict[str, Any]:
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        raw: Any = OmegaConf.to_container(compose("train", overrides=base.split()), resolve=True)
    return raw


def keys_of(base: str) -> list[str]:
    leaves = [key for key, _ in flat(composed(base))]
    sections = {key.rsplit(".", depth)[0] for key in leaves for depth in (1, 2)}
    return sorted({*leaves, *sections})


def refused(base: str, key: str, value: Any) -> bool:
    raw = copy.deepcopy(composed(base))
    section, _, name = key.rpartition(".")
    (at(raw, section) if section else raw)[name] = value
    try:
        plan_of(build_config(raw, [key]))
        return False
    except UserError as error:
        message = str(error)
    assert message
    for inner in ("constrained-", "literal[", "function-", "pydantic"):
        assert inner not in message, message
    return True


def owners() -> dict[str, str]:
    """Of each key the first base that has it."""
    return {key: base for base in reversed(BASES) for key in keys_of(base)}


def cases() -> list[tuple[str, str, Any]]:
    return [(base, key, value) for key, base in owners().items() for value in VALUES]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_key_with_any_value_is_refused_or_planned(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(BASES))
    refused(base, data.draw(st.sampled_from(keys_of(base))), data.draw(st.sampled_from(VALUES)))


def test_every_key_with_every_value() -> None:
    everything = cases()
    assert len(everything) > 4000
    crashed: dict[str, str] = {}
    count = 0
    for base, key, value in everything:
        try:
            count += refused(base, key, value)
        except Exception as error:  # all of them, in one message
            crashed[f"{key}={value!r}"[:200]] = repr(error)
    assert not crashed
    assert count > len(everything) / 2


def test_no_number_is_not_a_number() -> None:
    numbers = [(base, key) for key, base in owners().items() if isinstance(dict(flat(composed(base))).get(key), float)]
    assert len(numbers) > 40
    for base, key in numbers:
        assert refused(base, key, float("nan")) and refused(base, key, float("inf")), key


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("runner.experiment_name=../../x", "got '../../x', expected a name, or a/b: a folder below runner.output_dir"),
        ("runner.experiment_name=/tmp/x", "expected a name, or a/b"),
        ("runner.experiment_name=", "got '', expected a name"),
        ("runner.experiment_name=.", "got '.', expected a name"),
        ("runner.output_dir=/dev/null", "got /dev/null, but /dev/null is no folder"),
        ("runner.output_dir=/dev/null/below", "got /dev/null/below, but /dev/null is no folder"),
        ("env.train.max_episode_steps=100000000000000000000", "should be less than or equal to 1000000000"),
        ("env.reward_coef=nan", "env.reward_coef: got nan (float); input should be a finite number"),
        ("env.env_type=:", "env.env_type: got ':', expected module:Class, or path/to/file.py:Class"),
        ("env.env_type=..:b", "env.env_type: got '..:b', expected module:Class"),
        ("cluster.component_placement.env=0-100000000000", "env: got '0-100000000000', expected ranks up to 4095"),
        ("env.init_params.image_size=99999999", "should be less than or equal to 8192"),
        ("actor.micro_batch_size=x", "got 'x' (str); input should be a valid integer, or input should be 'auto'"),
        ("runner.max_steps=[1", "'runner.max_steps=[1': cannot be read as key=value"),
        ("runner.max_steps=1=2", "'runner.max_steps=1=2': cannot be read as key=value"),
        ("a b", "'a b': expected group=choice or key=value"),
        ("runner.max_steps=${foo}", "runner.max_steps: is made of foo, which is set nowhere"),
        ("runner.task_type=[]", "runner.task_type: got [], expected one of"),
        ("model.model_type=[]", "model.model_type: got [] (list)"),
        ("algorithm.group_size=1000000000", "algorithm.group_size: got 1000000000"),
    ],
)
def test_one_message(argument: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        checked(["env=dummy", argument])
    assert message in str(error.value)
    assert "hydra.cc" not in str(error.value) and "Exception" not in str(error.value)


def test_a_file_is_no_folder_of_weights() -> None:
    with pytest.raises(UserError, match=r"/dev/null/config\.json does not exist; give a folder of weights"):
        plan_of(checked(["env=dummy", "model=openvla_oft", "model.path=/dev/null"]))


def test_a_section_is_no_suggestion_for_a_key_in_it() -> None:
    with pytest.raises(ConfigError, match=r"runner\.foo: no such key\. runner has \w+, .*max_steps.* and \d+ more\.$"):
        checked(["env=dummy", "runner.foo=1"])


@pytest.mark.parametrize(
    ("given", "key", "file"),
    [
        (["env=dummy", "model=libero_10_vla"], "draft", "model/libero_10_vla"),
        (["env=metaworld", "model=libero_10_vla"], "reward", "model/libero_10_vla"),
        (["experiment=cartpole_ppo", "env=dummy"], "success_return", "experiment/cartpole_ppo"),
    ],
)
def test_a_presets_option_that_another_simulator_lacks(given: list[str], key: str, file: str) -> None:
    """The user never typed it."""
    with pytest.raises(ConfigError, match=rf"env\.init_params\.{key} \(set by {file}\): (no such key|got )"):
        checked(given)
    with pytest.raises(ConfigError, match=r"env\.init_params\.xyz: no such key"):
        checked([*given, "++env.init_params.xyz=1"])


@pytest.mark.parametrize(
    ("file", "text", "given", "problem"),
    [
        (
            "experiment/mine",
            "runner: {max_steps: 5}",
            ["experiment=mine"],
            "its keys are taken for experiment's; put this line first: # @package _global_",
        ),
        (
            "model/mine",
            "model: {model_type: cnn}",
            ["env=gymnasium", "model=mine"],
            "its keys are taken for model's; put this line first: # @package _global_",
        ),
        (
            "env/mine",
            "{name: mine, env_type: gymnasium, init_params: {id: Pendulum-v1}}",
            ["env=mine"],
            "lacks env.seed, env.task_ids, env.use_rel_reward, env.reward_coef, env.max_restarts, env.worker_timeout "
            "and 3 more; to have the group's defaults, begin with defaults: [base/common@_here_, _self_]",
        ),
        (
            "env/mine",
            "{name: mine, env_type: gymnasium, init_params: {id: Pendulum-v1}}",
            ["env=gymnasium", "env.init_params.id=Pendulum-v1", "eval_env=mine"],
            "more; to have the group's defaults, begin with defaults: [base/common@_here_, _self_]",
        ),
        (
            "algorithm/mine",
            "{adv_type: grpo}",
            ["env=dummy", "algorithm=mine"],
            "more; to have the group's defaults, begin with defaults: [base, _self_]",
        ),
    ],
)
def test_a_file_of_ones_own_that_lacks_its_first_line(
    tmp_path: Path, file: str, text: str, given: list[str], problem: str
) -> None:
    """Each key that is missing for want of it would be named instead, and the file never."""
    path = tmp_path / f"{file}.yaml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        checked([f"--config-dir={tmp_path}", *given, "runner.foo=1"])
    assert len(caught.value.problems) == 2, caught.value.problems
    own, other = sorted(caught.value.problems, key=lambda found: "foo" in found)
    assert own.startswith(f"{path}: ") and own.endswith(problem), own
    assert other.startswith("runner.foo: no such key")


def test_a_file_of_ones_own_that_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        checked([f"--config-dir={tmp_path}", "env=slider"])
    [problem] = caught.value.problems
    assert problem.startswith("env=slider: no such choice, expected one of dummy, ")
    assert problem.endswith(" A file of your own, <folder>/env/slider.yaml, is found with --config-dir <folder>")


def test_an_env_of_ones_own_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("{defaults: [base/common@_here_, _self_], env_type: dummy}")
    with pytest.raises(ConfigError, match=r"is made of env\.name, which is set nowhere"):
        checked([f"--config-dir={tmp_path}", "env=mine"])


def test_a_simulator_that_draws_nothing_makes_no_videos(tmp_path: Path) -> None:
    """It would be found out at the first evaluation, which is the last thing that a run does."""
    text = "class Mute:\n    @dataclass\n    class Params: pass\n"
    (tmp_path / "mute.py").write_text(f"from dataclasses import dataclass\n{text}")
    own = ("env=dummy", "model=mlp", f"env.env_type={tmp_path}/mute.py:Mute")
    with pytest.raises(ConfigError, match=r"env\.eval\.video_cfg\.save_video: got true, but Mute has no render\(\)"):
        checked([*own, "env.eval.video_cfg.save_video=true"])
    checked([*own, "env.eval.video_cfg.save_video=false"])


def test_a_name_unlike_all_others_gets_their_list() -> None:
    """What one simulator calls its task another one calls otherwise."""
    with pytest.raises(ConfigError, match=r"init_params\.task: no such key\. env\.init_params has .*\benv_id, "):
        checked(["env=maniskill", "env.init_params.task=PickCube-v1"])


def test_what_hydra_prints_obeys_the_same_grammar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["env=dummy", "runner.max_steps=[1", "--cfg", "job"])
    assert ending.value.code == 2
    assert "'runner.max_steps=[1': cannot be read as key=value" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["env=dummy", "cluster=serial", "runner.output_dir=/proc/nothing"])
    assert ending.value.code == 2
    error = capsys.readouterr().err
    assert "error: runner.output_dir: /proc/nothing/" in error and "cannot be made" in error
