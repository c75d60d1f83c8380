"""What a run set that its defaults do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import yaml
from hydra.errors import HydraException

from embodied_rl.command_line import origins
from embodied_rl.composition import config_of
from embodied_rl.config import GROUPS
from embodied_rl.errors import UserError
from embodied_rl.params import flat, shown
from embodied_rl.report.data import Run

_ABSENT: Final = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key whose value is not the default."""

    key: str
    value: str
    default: str
    origin: str
    """What set it: ``command line`` or a file such as ``experiment/dummy_grpo``; empty where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's settings of its own."""

    against: str
    """The command line that stands for the defaults."""
    rows: tuple[Setting, ...]


def settings(run: Run) -> Settings | None:
    """The keys in which a run differs from the defaults of its task and of the choices made on its command line; None
    where these cannot be composed, as of a choice in a folder that is gone."""
    choices, found = [f"task={run.task}"], {}
    try:
        if run.command is not None:
            origin = origins(run.command)
            found = origin.keys
            choices = _choices(run, origin.files)
        plain = asdict(config_of(*choices))
    except (UserError, HydraException, ValueError, TypeError):
        return None
    defaults = dict(flat(yaml.safe_load(yaml.safe_dump(plain))))
    own = dict(flat(run.config))
    return Settings(
        against=" ".join(choices),
        rows=tuple(
            Setting(
                key=key,
                value=_text(own, key),
                default=_text(defaults, key),
                origin=_origin(key, found),
            )
            for key in own
            if own[key] != defaults.get(key, _ABSENT)
        ),
    )


def _choices(run: Run, files: Sequence[str]) -> list[str]:
    """The group choices of a command line without its recipe and its values, but with what the recipe chose."""
    chosen = {"task": run.task}
    for file in files:
        group, _, choice = file.partition("/")
        if group in GROUPS and group not in ("task", "experiment") and choice and "base" not in choice.split("/"):
            chosen[group] = choice
    given = [text for text in run.command or () if text.startswith(("eval_env=", "--config-dir", "-cd"))]
    return [*given, *(f"{group}={choice}" for group, choice in chosen.items())]


def _origin(key: str, found: Mapping[str, str]) -> str:
    """That of the key, or of the section around it that was set as a whole."""
    while key:
        if key in found:
            return found[key]
        key = key.rpartition(".")[0]
    return ""


def _text(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else _ABSENT
