"""Episodes that go on over training steps: when they enter the metrics, and whether a resumed run has the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.schema import EmbodiedConfig

_OTHER = ("name", "reward_coef", "use_rel_reward", "eval")
"""Of ``env``: what changes no course of an episode."""


def reportable(ended: Sequence[EpisodeRecord], num_envs: int) -> bool:
    """Whether each env ended an episode among ``ended``.

    Where episodes are longer than rollouts, those that end within a few of them are the quick ones, which succeeded. So
    metrics are made of the episodes of so many rollouts that every env is among them, with its failures.
    """
    return len({episode.env_id for episode in ended}) == num_envs


def settings_of(config: EmbodiedConfig) -> dict[str, Any]:
    """The keys, with values as JSON gives them back, that an env's course is a function of, beside its actions."""
    env = {key: value for key, value in asdict(config.env).items() if key not in _OTHER}
    train = {key: value for key, value in env.pop("train").items() if key != "video_cfg"}
    settings = {
        **{f"env.{key}": value for key, value in env.items()},
        **{f"env.train.{key}": value for key, value in train.items()},
        "algorithm.group_size": config.algorithm.group_size,
        "model.num_action_chunks": config.model.num_action_chunks,
    }
    settings.pop("env.train.max_steps_per_rollout_epoch")
    return json.loads(json.dumps(settings))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: before -> now`` for each that differs."""
    keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]
