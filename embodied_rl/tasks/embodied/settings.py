"""What the course of an env's episodes depends on, to tell whether those of a checkpoint can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from embodied_rl.envs.base import params_of_episodes
from embodied_rl.schema import EmbodiedConfig

_WITHOUT_EFFECT: Final = (
    "name",
    "reward_coef",
    "use_rel_reward",
    "eval",
    "max_restarts",
    "worker_timeout",
    "max_memory_gb",
)
"""Keys of ``env`` that change no course of an episode."""


def settings_of(config: EmbodiedConfig) -> dict[str, Any]:
    """The keys, with values as JSON gives them back, that an env's course is a function of, beside its actions."""
    env = {key: value for key, value in asdict(config.env).items() if key not in _WITHOUT_EFFECT}
    train = {key: value for key, value in env.pop("train").items() if key not in ("video_cfg", "enable_offload")}
    settings = {
        **{f"env.{key}": value for key, value in env.items()},
        **{f"env.train.{key}": value for key, value in train.items()},
        "algorithm.group_size": config.algorithm.group_size,
        "model.num_action_chunks": config.model.num_action_chunks,
    }
    settings.pop("env.train.max_steps_per_rollout_epoch")
    if not train["stagger"]:  # as in checkpoints that are older than the key
        settings.pop("env.train.stagger")
    return json.loads(json.dumps(settings))


def changes(before: Mapping[str, Any], config: EmbodiedConfig) -> list[str]:
    """``key: before -> now`` for each that differs, of what a checkpoint was saved with."""
    left, right = (_of_episodes(settings) for settings in (before, settings_of(config)))
    keys = [key for key in {**right, **left} if left.get(key) != right.get(key)]
    return [f"{key}: {left.get(key)} -> {right.get(key)}" for key in keys]


def _of_episodes(settings: Mapping[str, Any]) -> dict[str, Any]:
    params = params_of_episodes(str(settings.get("env.env_type")), settings.get("env.init_params") or {})
    return {**settings, "env.init_params": params}
