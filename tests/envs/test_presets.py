"""Env presets: each says what is its own; ``base/common`` has the default of every other key."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from embodied_rl.schema import EnvConfig

OWN = {
    "name",
    "env_type",
    "train.total_num_envs",
    "train.max_episode_steps",
    "eval.total_num_envs",
    "eval.max_episode_steps",
    "eval.episodes_per_task",
}


def keys_of(section: type, prefix: str = "") -> set[str]:
    found: set[str] = set()
    hints = get_type_hints(section)
    for field in fields(section):
        kind = hints[field.name]
        found |= (
            keys_of(kind, f"{prefix}{field.name}.")
            if isinstance(kind, type) and is_dataclass(kind)
            else {prefix + field.name}
        )
    return found


def keys_in(content: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in content.items():
        found |= keys_in(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found


def test_the_common_base_has_every_key_but_the_envs_own() -> None:
    common = yaml.safe_load(Path("config/env/base/common.yaml").read_text())
    assert keys_in(common) == keys_of(EnvConfig) - OWN
