"""Configurations for tests: what a command line would give."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.cli import config_of
from embodied_rl.schema import EmbodiedConfig, EmbodiedSftConfig, MathConfig


def embodied(*overrides: str) -> EmbodiedConfig:
    """The configuration of ``python train.py <overrides>``, where that is ``task=embodied``."""
    config = config_of(*overrides)
    assert isinstance(config, EmbodiedConfig)
    return config


def tiny_run(directory: Path, *overrides: str) -> EmbodiedConfig:
    """A run of seconds on the dummy env that writes below ``directory`` only."""
    return embodied(
        "env=dummy",
        f"runner.output_dir={directory / 'results'}",
        f"env.eval.video_cfg.video_base_dir={directory / 'videos'}",
        "env.eval.video_cfg.save_video=false",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=16",
        "env.eval.total_num_envs=8",
        "env.eval.max_episode_steps=16",
        "env.eval.episodes_per_task=2",
        "cluster.num_threads.actor=1",
        "runner.logger.logger_backends=[jsonl]",
        "runner.report=false",
        *overrides,
    )


def embodied_sft(data: Path, *overrides: str) -> EmbodiedSftConfig:
    """Imitation of the dummy env's demonstrations in ``data``."""
    config = config_of(
        "task=sft",
        "env=dummy",
        "model=mlp",
        f"data.path={data}",
        "runner.report=false",
        "env.eval.video_cfg.save_video=false",
        "cluster.num_threads.actor=1",
        *overrides,
    )
    assert isinstance(config, EmbodiedSftConfig)
    return config


def small_math(*overrides: str, task: str = "math") -> MathConfig:
    """Sums of one digit for a model of a few thousand parameters, in this process."""
    group = ["algorithm.group_size=4"] if task == "math" else []
    config = config_of(
        f"task={task}",
        "model=tiny_lm",
        "cluster=serial",
        "runner.report=false",
        "model.params.architecture={type: qwen2, hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}",
        "data.params.digits=1",
        "data.rollout_batch_size=6",
        "data.eval_size=8",
        "data.max_prompt_length=8",
        "rollout.max_new_tokens=8",
        *group,
        *overrides,
    )
    assert isinstance(config, MathConfig)
    return config


def tiny_math_run(directory: Path, *overrides: str, task: str = "math") -> MathConfig:
    """A run of seconds that writes below ``directory`` only."""
    return small_math(
        f"runner.output_dir={directory / 'results'}",
        "runner.max_steps=2",
        "runner.save_interval=1",
        "runner.val_before_train=false",
        "cluster.num_threads={actor: 1, rollout: 1}",
        "runner.logger.logger_backends=[jsonl]",
        *overrides,
        task=task,
    )


REQUIRED = {"put_on_plate": ("env.init_params.assets=/carrot",), "put_carrot_ppo": ("model.path=/weights",)}
"""What a choice of env or experiment leaves to its user."""
