"""Configurations for tests: what a command line would give."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.cli import config_of
from embodied_rl.schema import Config


def tiny_run(directory: Path, *overrides: str) -> Config:
    """A run of seconds on the dummy env that writes below ``directory`` only."""
    return config_of(
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
        *overrides,
    )
