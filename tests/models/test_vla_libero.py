"""A tiny checkpoint's whole life on the real simulator: made, trained, resumed, exported, evaluated, adapted on two
ranks. One test a model that has published folders."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from embodied_rl.cli import main

pytest.importorskip("libero", reason="the libero extra is not installed")

LIBERO = (
    "task=embodied",
    "env=libero_10",
    "env.init_params.draft=true",
    "env.task_ids=[0]",
    "env.train.total_num_envs=4",
    "algorithm.group_size=2",
    "env.train.max_episode_steps=16",
    "env.eval.total_num_envs=2",
    "env.eval.max_episode_steps=16",
    "env.eval.episodes_per_task=2",
    "env.eval.video_cfg.save_video=false",
    "runner.logger.logger_backends=[jsonl]",
    "runner.eval_at_end=false",
    "cluster.component_placement={env: 0, rollout: 0, actor: 0}",
    "rollout.pipeline_stage_num=1",
    "algorithm.sampling_params.temperature=1.6",
    # A random policy never succeeds, so every advantage is 0: the entropy is what there is to learn from.
    "algorithm.entropy_bonus=0.01",
)
# Which samples of actions have an entropy that the weights decide.
MODELS = {
    "openvla": [],
    "openvla_oft": [],
    "pi0": ["model.params.num_steps=2", "model.params.noise_method=flow_noise"],
    "pi05": ["model.params.num_steps=2", "model.params.noise_method=flow_noise"],
    "smolvla": ["model.params.num_steps=2", "model.params.noise_method=flow_noise"],
}
PPO = ("algorithm=ppo", "algorithm.group_size=1", "algorithm.n_minibatches=1", "algorithm.update_epoch=1")


def metrics(results: Path) -> list[dict[str, float]]:
    [path] = results.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("simulator")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_the_life_of_a_checkpoint(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By commands, in this process: the start of five interpreters would take as long as all that they do."""
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def program(*arguments: object) -> None:
        main([str(argument) for argument in arguments])

    def run(results: str, *overrides: str) -> list[dict[str, float]]:
        where = f"runner.output_dir={tmp_path / results}"
        program(*LIBERO, f"model={model}", *MODELS[model], where, *overrides)
        return metrics(tmp_path / results)

    tiny, exported = tmp_path / "tiny", tmp_path / "exported"
    program("make-tiny", f"model={model}", tiny)

    grpo = ("algorithm=grpo", f"model.path={tiny}", "cluster=serial")
    run("grpo", *grpo, "runner.max_steps=1")
    trained = run("grpo", *grpo, "runner.max_steps=2", "runner.resume_dir=auto")
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["env/steps"] == 4 * 16
        assert line["actor/grad_norm"] > 0
        assert line["actor/ratio"] == pytest.approx(1.0, abs=1e-4)  # act and evaluate agree, workers and all
        assert all(math.isfinite(value) for value in line.values())

    [experiment] = (tmp_path / "grpo").iterdir()
    program("export", experiment, exported)
    before, after = ({p.name for p in folder.glob("*.safetensors")} for folder in (tiny, exported))
    assert before <= after

    ranks = "cluster.component_placement={env: 0, rollout: 0, actor: 0-1}"
    evaluated = "runner.eval_at_end=true"
    ppo = (*PPO, f"model.path={exported}", "runner.max_steps=1")
    [adapted] = run("ppo", *ppo, "model.lora.rank=4", ranks, evaluated)
    assert adapted["actor/value_loss"] > 0
    assert adapted["actor/grad_norm"] > 0
    assert adapted["eval/episodes"] == 2
