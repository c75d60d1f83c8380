"""Whole runs that train on a replay buffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied_rl.cli import main
from embodied_rl.errors import UserError
from embodied_rl.launch import run
from embodied_rl.models.base import PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.training.replay import FILE
from embodied_rl.workers.rollout import RolloutWorker
from tests.checkpoints.saved import saved_tensors
from tests.configs import embodied, tiny_run
from tests.demonstrations.recording import record
from tests.test_end_to_end import assert_equal, metrics_of, only_run

SAC = (
    "model=sac_mlp",
    "algorithm=sac",
    "algorithm.sac.hidden_size=16",
    "algorithm.replay.batch_size=32",
    "algorithm.replay.learning_starts=40",
    "algorithm.replay.random_chunks=40",
    "algorithm.replay.update_to_data=0.2",
    "model.num_action_chunks=4",
    "runner.eval_at_end=false",
    "runner.max_steps=2",
)


def test_one_process_and_several_train_alike(tmp_path: Path) -> None:
    """With demonstrations, and checkpoints that are written beside the training."""
    shown = record(tmp_path / "shown", range(4))
    folders = []
    for cluster in ("serial", "process"):
        keys = (f"cluster={cluster}", f"algorithm.replay.demonstrations={shown}", "runner.save_async=true")
        config = tiny_run(tmp_path / cluster, *SAC, *keys)
        run(config)
        folders.append(only_run(config))
    serial, process = folders
    assert metrics_of(serial) == metrics_of(process)
    assert metrics_of(serial)[-1]["actor/updates"] > 0
    saved = [folder / "checkpoints/global_step_2" for folder in folders]
    assert_equal(*map(saved_tensors, saved))
    assert_equal(*(load_file(folder / FILE) for folder in saved))


def test_steps_are_random_until_so_many_chunks_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes that succeed early leave most of a step's 160 chunks out. A resumed run counts on."""
    drawn: dict[int, bool] = {}
    answer = RolloutWorker._answer_all

    async def spy(worker: RolloutWorker, mode: Any, step: int, first_epoch: int, at_random: bool) -> int:
        drawn[step] = at_random
        return await answer(worker, mode, step, first_epoch, at_random)

    monkeypatch.setattr(RolloutWorker, "_answer_all", spy)
    early = ("env.init_params.success_radius=1.5", "env.train.max_episode_steps=40", "cluster=serial")
    keys = (*SAC, *early, "algorithm.replay.random_chunks=80", "runner.max_steps=5", "runner.save_interval=2")
    config = tiny_run(tmp_path, *keys)
    run(config)
    directory = only_run(config)
    lines = metrics_of(directory)
    came = [sum(line["actor/samples"] for line in lines[:step]) for step in range(5)]
    assert came[-1] >= 80 > came[2] > 0, "else any rule would do"
    assert drawn == {step: chunks < 80 for step, chunks in enumerate(came)}
    whole = drawn.copy()
    run(tiny_run(tmp_path, *keys, f"runner.resume_dir={directory / 'checkpoints/global_step_2'}"))
    assert drawn == whole
    assert metrics_of(directory) == lines


def test_rollouts_may_run_ahead(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *SAC, "runner.max_steps=3", "rollout.max_staleness=1", "runner.save_interval=-1")
    run(config)
    lines = metrics_of(only_run(config))
    assert [line["actor/staleness"] for line in lines][-1] == 1
    assert lines[-1]["actor/updates"] > 0


def residual(tmp_path: Path, *overrides: str) -> tuple[str, ...]:
    """Corrections of a small VLA that is in a folder there."""
    spec = PolicySpec(
        action_dim=2, num_action_chunks=4, state_dim=4, image_shapes={"agentview": (32, 32)}, values_per_chunk=0
    )
    small = {"hidden_size": 16, "num_layers": 1}
    torch.manual_seed(0)
    build_policy("tiny_vla", spec, small).save_pretrained(tmp_path / "base")
    return (
        *SAC[1:],
        "model=residual",
        f"model.path={tmp_path / 'base'}",
        "++model.params.base_params={hidden_size: 16, num_layers: 1}",
        "++model.params.hidden_size=16",
        "++model.params.corrections_per_chunk=2",
        "++env.init_params.image_size=32",
        "algorithm.replay.random_chunks=0",
        *overrides,
    )


def test_corrections_of_a_policy_that_looks_are_learned_from_a_buffer(tmp_path: Path) -> None:
    """With demonstrations that have pictures, in one process and several, resumed, and played from its folder."""
    shown = record(tmp_path / "shown", range(4), image_size=32)
    keys = residual(tmp_path, f"algorithm.replay.demonstrations={shown}", "runner.save_interval=1")
    folders = []
    for cluster in ("serial", "process"):
        config = tiny_run(tmp_path / cluster, *keys, f"cluster={cluster}")
        run(config)
        folders.append(only_run(config))
    serial, process = folders
    assert metrics_of(serial) == metrics_of(process)
    assert metrics_of(serial)[-1]["actor/updates"] > 0
    first, second = (saved_tensors(serial / f"checkpoints/global_step_{step}") for step in (1, 2))
    changed = {name for name in first if name.startswith("model.") and not torch.equal(first[name], second[name])}
    assert changed and not any(name.startswith("model.base.") for name in changed)
    buffer = load_file(serial / "checkpoints/global_step_2" / FILE)
    assert buffer["inputs/state"].shape[1:] == (16 * 2 + 4 + 4 * 2,), "what the base made of pictures"

    run(
        tiny_run(
            tmp_path / "serial", *keys, "cluster=serial", f"runner.resume_dir={serial / 'checkpoints/global_step_1'}"
        )
    )
    assert_equal(second, saved_tensors(serial / "checkpoints/global_step_2"))

    main(["export", str(serial / "checkpoints/global_step_2"), str(tmp_path / "folder")])
    scores = []
    for source in (f"runner.init_from={serial}", f"model.path={tmp_path / 'folder'}"):
        config = tiny_run(tmp_path / source[:6], *keys, "cluster=serial", "runner.only_eval=true", source)
        run(config)
        evaluation = json.loads(next(only_run(config).glob("eval_*/eval.json")).read_text())
        scores.append(evaluation["overall"]["avg_sum_reward"])
    assert scores[0] == scores[1]


def test_demonstrations_are_looked_at_by_the_base_that_is_loaded(tmp_path: Path) -> None:
    """By a sharded policy, too; and not by the one that model.path gives, where a checkpoint has another."""
    shown = record(tmp_path / "shown", range(2), image_size=32)
    precise = "actor.fsdp_config.mixed_precision.param_dtype=bfloat16"
    keys = residual(tmp_path, f"algorithm.replay.demonstrations={shown}", "cluster=serial", precise)
    config = tiny_run(tmp_path / "first", *keys, "runner.max_steps=1")
    run(config)
    started = only_run(config)
    more = (*keys, "model.path=null", "runner.save_interval=1")
    config = tiny_run(tmp_path / "more", *more, f"runner.init_from={started}", "runner.max_steps=2")
    run(config)
    whole = saved_tensors(only_run(config) / "checkpoints/global_step_2")
    run(tiny_run(tmp_path / "more", *more, f"runner.resume_dir={only_run(config) / 'checkpoints/global_step_1'}"))
    assert_equal(whole, saved_tensors(only_run(config) / "checkpoints/global_step_2"))


def test_corrections_of_nothing_are_refused(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, *residual(tmp_path), "model.path=null", "cluster=serial")
    with pytest.raises(UserError, match=r"model\.path: got null, but model_type=residual builds on a policy that is"):
        run(config)


def test_corrections_are_learned_by_ppo(tmp_path: Path) -> None:
    keys = [key for key in residual(tmp_path) if not key.startswith("algorithm")]
    config = tiny_run(tmp_path, *keys, "algorithm=ppo", "algorithm.n_minibatches=2", "cluster=serial")
    run(config)
    line = metrics_of(only_run(config))[-1]
    assert line["actor/policy_loss"] != 0 and line["actor/value_loss"] > 0
    tensors = saved_tensors(only_run(config) / "checkpoints/global_step_2")
    assert "model.value_head.0.weight" in tensors and "model.base.slots" in tensors


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum_is_learned_in_eight_thousand_steps(tmp_path: Path) -> None:
    """PPO's preset needs 38,400 or more."""
    config = embodied(
        "experiment=pendulum_sac",
        "actor.seed=1",
        "env.seed=1",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.report=false",
        "runner.logger.logger_backends=[jsonl]",
        f"runner.output_dir={tmp_path}",
    )
    run(config)
    evaluation = json.loads(next(only_run(config).glob("eval_*/eval.json")).read_text())
    assert evaluation["overall"]["avg_sum_reward"] > -250
