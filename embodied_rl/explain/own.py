"""Our own keys: type, documentation and defaults, from the schema's docstrings and the composed configuration."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from embodied_rl.cli import CONFIG_MODULE, GROUPS
from embodied_rl.schema import TASKS

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


def documentation(section: type) -> dict[str, tuple[str, str]]:
    """Field -> (type, docstring) of a schema dataclass, inherited fields first."""
    found: dict[str, tuple[str, str]] = {}
    for part in reversed(section.__mro__):
        if dataclasses.is_dataclass(part):
            found |= _documentation_of_one(part)
    return found


@cache
def own_keys() -> dict[str, OwnKey]:
    """Every key that takes a value, over all tasks."""
    found: dict[str, OwnKey] = {}
    presets = dict(_algorithm_presets())
    for task, schema in TASKS.items():
        defaults = default_values(task)
        for key, kind, text, free_form in _leaves(schema, ""):
            default = shown(_value_at(defaults, key))
            known = found[key].defaults if key in found else {}
            found[key] = OwnKey(
                key=key,
                kind=kind,
                text=text,
                defaults={**known, task: default},
                presets=presets.get(key, {}),
                free_form=free_form,
            )
    return found


@cache
def own_groups() -> dict[str, OwnGroup]:
    """Every config group."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        composed = compose("train", return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        choices = {name: tuple(c for c in loader.get_group_options(name) if c != "base") for name in GROUPS}
    chosen = composed.hydra.runtime.choices
    # A choice may be made under another package (model@_global_.model).
    default = {str(name).partition("@")[0]: shown(choice) for name, choice in chosen.items()}
    return {name: OwnGroup(name=name, default=default[name], choices=choices[name]) for name in GROUPS}


def default_values(task: str) -> dict[str, Any]:
    """The composed configuration of a task, interpolations left as they are written."""
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        composed = compose("train", overrides=list(SHOWN_WITH.get(task, (f"task={task}",))))
    values: Any = OmegaConf.to_container(composed, resolve=False)
    return values


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shown(below)}" for name, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _documentation_of_one(section: type) -> dict[str, tuple[str, str]]:
    [definition] = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            name = node.target.id
            found[name] = (ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = (found[name][0], " ".join(str(node.value.value).split()))
    return found


def _leaves(section: type, prefix: str) -> Iterator[tuple[str, str, str, bool]]:
    """(key, type or choices, text, whether any name may follow) of everything below a section."""
    hints = get_type_hints(section)
    for name, (kind, text) in documentation(section).items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _choices(hint) or kind, text.replace("``", ""), get_origin(hint) is dict


def _choices(hint: Any) -> str:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return " | ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else ""


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node[part]
    return node


def _algorithm_presets() -> Iterator[tuple[str, dict[str, str]]]:
    """Key -> preset -> the value it sets, of what the files under ``config/algorithm`` say themselves."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((files(CONFIG_MODULE) / "algorithm").iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".yaml")
        if name in (file.name, "base"):
            continue
        for key, value in _flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {}, "algorithm."):
            found.setdefault(key, {})[name] = shown(value)
    yield from found.items()


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}", value
