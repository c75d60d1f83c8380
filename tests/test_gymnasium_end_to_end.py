"""Training on Gymnasium envs: one's own from an empty folder, and whole runs over what can be combined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodied_rl.cli import config_of
from embodied_rl.errors import ConfigError
from embodied_rl.launch import run
from embodied_rl.schema import EmbodiedConfig
from tests.checkpoints.saved import saved_weights
from tests.configs import embodied
from tests.packaging.documented import blocks
from tests.test_end_to_end import metrics_of, only_run

ROOT = Path(__file__).resolve().parents[1]
OWN = next(block.text for block in blocks(Path("docs/gymnasium.md")) if block.text.startswith("# my_module.py"))
PPO = ("algorithm=ppo", "env.train.auto_reset=true", "env.train.max_steps_per_rollout_epoch=32")
GRPO = ("algorithm=grpo", "env.train.max_episode_steps=32")


def small(directory: Path, *overrides: str) -> EmbodiedConfig:
    return embodied(
        "env=gymnasium",
        f"runner.output_dir={directory}",
        "env.eval.total_num_envs=4",
        "env.eval.episodes_per_task=6",
        "env.eval.max_episode_steps=40",
        "cluster.num_threads.actor=1",
        "runner.logger.logger_backends=[jsonl]",
        "runner.report=false",
        "runner.save_interval=1",
        *overrides,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["serial", "process"])
def test_an_env_of_thirty_lines_from_an_empty_folder(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "my_module.py").write_text(OWN)
    assert len(OWN.strip().splitlines()) <= 31, "30 lines and the file's name"
    command = [sys.executable, "-m", "embodied_rl", "env=gymnasium", "env.init_params.id=my_module:Lane-v0", *PPO]
    options = ["env.init_params.success_return=25", "runner.max_steps=12", "runner.val_before_train=true"]
    settings = [f"cluster={cluster}", "cluster.num_threads.actor=1", "runner.report=false", "runner.save_interval=-1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, *options, *settings], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    before, after = (
        json.loads(file.read_text())["overall"] for file in sorted(tmp_path.glob("results/*/*/eval_*/eval.json"))
    )
    assert before["pc_success"] < 20
    assert before["n_failures"] > 16
    assert after["pc_success"] > 90
    assert after["avg_sum_reward"] > 25


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("experiment", "wanted"), [("cartpole_ppo", 475), ("pendulum_ppo", -25)])
def test_the_presets_learn(tmp_path: Path, experiment: str, wanted: float) -> None:
    """Pendulum's rewards are a tenth of Gymnasium's there."""
    run(embodied(f"experiment={experiment}", f"runner.output_dir={tmp_path}"))
    *_, report = sorted(tmp_path.glob("*/*/eval_step_*/eval.json"))
    assert json.loads(report.read_text())["overall"]["avg_sum_reward"] >= wanted


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_policy_and_update_agree_while_observations_are_normalised(
    tmp_path: Path, env_id: str, algorithm: tuple[str, ...]
) -> None:
    """With one optimiser step an update, every probability ratio is 1 if both sides had the same statistics."""
    config = small(
        tmp_path, "cluster=serial", f"env.init_params.id={env_id}", *algorithm, "runner.max_steps=3",
        "algorithm.update_epoch=1", "algorithm.n_minibatches=1", "runner.max_keep=null",
    )  # fmt: skip
    run(config)
    lines, run_dir = metrics_of(only_run(config)), only_run(config)
    trained = [line for line in lines if "actor/ratio" in line]
    assert len(trained) == 3
    assert [line["actor/ratio"] for line in trained] == pytest.approx([1.0] * 3, abs=1e-5)
    assert [line["actor/approx_kl"] for line in trained] == pytest.approx([0.0] * 3, abs=1e-8)
    assert all(line["actor/grad_norm"] > 0 for line in trained)
    steps = 0.0
    for number, line in enumerate(trained, 1):
        steps += line["env/steps"]
        weights = saved_weights(run_dir / f"checkpoints/global_step_{number}")
        assert weights["normalizer.count"].item() == steps, "one action a decision, each state once"
        assert not torch.equal(weights["normalizer.mean"], torch.zeros_like(weights["normalizer.mean"]))


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_processes_do_what_one_process_does(tmp_path: Path, env_id: str, algorithm: tuple[str, ...]) -> None:
    found = []
    for cluster in ("serial", "process"):
        config = small(
            tmp_path / cluster,
            f"cluster={cluster}",
            f"env.init_params.id={env_id}",
            *algorithm,
            "runner.max_steps=2",
            "env.eval.max_episode_steps=500",
        )
        run(config)
        (report,) = only_run(config).glob("eval_step_*/eval.json")
        evaluated = json.loads(report.read_text())
        assert evaluated["overall"]["n_episodes"] == 6
        assert (evaluated["overall"]["n_failures"] > 0) == (env_id == "CartPole-v1")
        found.append((metrics_of(only_run(config)), evaluated["episodes"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("told", "warned"), [((), True), (("env.init_params.success_return=-9000",), False)])
def test_a_rate_that_nothing_tells_says_so(
    tmp_path: Path, told: tuple[str, ...], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path, "env.init_params.id=Pendulum-v1", "cluster=serial", "runner.only_eval=true", *told))
    printed = capsys.readouterr().out
    assert ("0/6" if warned else "6/6") in printed
    assert ("no step said whether it succeeded, so the rate says nothing" in printed) == warned


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("env.init_params.id=CartPol-v1", "Did you mean 'CartPole-v1'"),
        ("env.init_params.id=nosuch_module:A-v0", "'nosuch_module' cannot be imported"),
        ("env.init_params.wrappers=[TimeAwareObservations]", "Did you mean 'TimeAwareObservation'"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_anything_starts(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("env=gymnasium", option)


def test_a_model_without_choices_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, "cluster=serial", "model=tiny_vla", "env.init_params.pixels=true")
    with pytest.raises(Exception, match="gives continuous actions, and this env takes choices"):
        run(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "recipe"), [("CartPole-v1", PPO), ("Pendulum-v1", PPO), ("CartPole-v1", GRPO)], ids=str
)
def test_convolutions_on_what_an_env_renders(tmp_path: Path, env_id: str, recipe: tuple[str, ...]) -> None:
    """In processes and in one; resumed, evaluated; with actions that are choices and such that are not."""
    options = (f"env.init_params.id={env_id}", "env.init_params.pixels=true", "model=cnn", *recipe)
    options += ("env.init_params.camera_height=40", "env.init_params.camera_width=48", "env.train.total_num_envs=16")
    options += ("model.params.image_features=32", "algorithm.n_minibatches=1", "actor.global_batch_size=null")
    found = []
    for name, cluster in (("a", "serial"), ("b", "process")):
        config = small(tmp_path / name, *options, f"cluster={cluster}", "runner.max_steps=2")
        run(config)
        found.append(metrics_of(only_run(config)))
    assert found[0] == found[1]
    weights = saved_weights(only_run(config) / "checkpoints/global_step_2")
    assert weights["cameras.agentview.0.weight"].shape == (32, 3, 8, 8)
    first = saved_weights(only_run(config) / "checkpoints/global_step_1")
    assert not torch.equal(first["cameras.agentview.0.weight"], weights["cameras.agentview.0.weight"])
    part = small(tmp_path / "a", *options, "cluster=serial", "runner.max_steps=2")
    step = only_run(part) / "checkpoints/global_step_1"
    run(small(tmp_path / "a", *options, "cluster=serial", "runner.max_steps=2", f"runner.resume_dir={step}"))
    resumed = saved_weights(only_run(part) / "checkpoints/global_step_2")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())


def test_pictures_too_small_for_the_convolutions_are_refused(tmp_path: Path) -> None:
    small_pictures = ("env.init_params.pixels=true", "env.init_params.camera_height=32")
    with pytest.raises(
        Exception, match=r"the camera agentview has 32x\d+ pixels, and the convolutions need at least 36"
    ):
        run(small(tmp_path, "cluster=serial", "model=cnn", *small_pictures))
