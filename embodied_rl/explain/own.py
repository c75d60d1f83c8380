"""Our own keys: type, documentation and defaults, from the schema's docstrings and the composed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from embodied_rl.composition import hydra_of_our_own
from embodied_rl.config import CONFIG_MODULE, GROUPS
from embodied_rl.params import flat, shown
from embodied_rl.tasks.table import TASKS

SHOWN_WITH: Final = {"embodied": ("task=embodied", "env=libero_10")}
"""Task -> the command line whose values are shown as defaults, where it is not ``task=<name>`` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKey:
    """One of our keys."""

    key: str
    kind: str
    """Its type, or the choices there are."""
    text: str
    """Its documentation."""
    defaults: Mapping[str, str]
    """Task -> default, as on the command line."""
    presets: Mapping[str, str]
    """Choice of the group ``algorithm`` that sets it -> value."""
    free_form: bool
    """Any name may follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGroup:
    """One of our config groups: ``name=choice`` on the command line."""

    name: str
    default: str
    choices: tuple[str, ...]


@cache
def own_keys() -> dict[str, OwnKey]:
    """Every key that takes a value, over all tasks."""
    found: dict[str, OwnKey] = {}
    for task in TASKS:
        for key, about in task_keys(task).items():
            known = found[key].defaults if key in found else {}
            found[key] = replace(about, defaults={**known, **about.defaults})
    return found


@cache
def task_keys(task: str) -> dict[str, OwnKey]:
    """Every key of a task that takes a value."""
    with hydra_of_our_own():
        composed = compose("train", overrides=list(SHOWN_WITH.get(task, (f"task={task}",))))
    values = OmegaConf.to_container(composed, resolve=False)  # interpolations as they are written
    return {about.key: about for about in _leaves(task, TASKS[task].config, values)}


@cache
def own_groups() -> dict[str, OwnGroup]:
    """Every config group."""
    with hydra_of_our_own():
        composed = compose("train", return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        choices = {name: tuple(c for c in loader.get_group_options(name) if c != "base") for name in GROUPS}
    chosen = composed.hydra.runtime.choices
    # A choice may be made under another package (model@_global_.model); eval_env is a second one of its group.
    first = {str(name): choice for name, choice in chosen.items() if not str(name).endswith("@eval_env")}
    default = {name.partition("@")[0]: shown(choice) for name, choice in first.items()}
    return {name: OwnGroup(name=name, default=default[name], choices=choices[name]) for name in GROUPS}


def documentation(section: type) -> dict[str, str]:
    """Field -> docstring of a schema dataclass, inherited fields first."""
    found = {field.name: "" for field in dataclasses.fields(section)}
    parts: list[Any] = [part for part in reversed(section.__mro__) if dataclasses.is_dataclass(part)]
    for part in parts:
        for name, about in TypeAdapter(part).json_schema()["properties"].items():
            found[name] = " ".join(about.get("description", found[name]).split())
    return found


def _leaves(task: str, section: type, values: Any, prefix: str = "") -> Iterator[OwnKey]:
    """Everything below a section that takes a value."""
    hints, texts = get_type_hints(section), documentation(section)
    for field in dataclasses.fields(section):
        key, hint, value = f"{prefix}{field.name}", hints[field.name], values.get(field.name, field.default)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(task, hint, value, f"{key}.")
        else:
            yield OwnKey(
                key=key,
                kind=_choices(hint) or str(field.type),
                text=texts[field.name],
                defaults={task: shown(value)},
                presets=_algorithm_presets().get(key, {}),
                free_form=get_origin(hint) is dict,
            )


def _choices(hint: Any) -> str:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return " | ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else ""


@cache
def _algorithm_presets() -> dict[str, dict[str, str]]:
    """Key -> preset -> the value it sets, of what the files under ``config/algorithm`` say themselves."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((files(CONFIG_MODULE) / "algorithm").iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".yaml")
        if name in (file.name, "base"):
            continue
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for key, value in flat({key: part for key, part in content.items() if key != "defaults"}, "algorithm"):
            found.setdefault(key, {})[name] = shown(value)
    return found
