"""From a plain dict to a checked :class:`Config`: types, unknown keys and rules across fields, all problems at once.

No torch here, and no simulator: a mistake is answered before anything heavy is imported or any worker starts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import ValidationError

from embodied_rl.errors import ConfigError, suggestion
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS
from embodied_rl.monitoring.metrics import backend_problems
from embodied_rl.params import at, describe, flat, validator
from embodied_rl.runtime.placement import PlacementError, later_lines_win
from embodied_rl.schema import (
    Config,
)
from embodied_rl.tasks.algorithm_rules import algorithm_problems
from embodied_rl.tasks.planning import placement_of
from embodied_rl.tasks.rules import (
    AUTO,
    acting_problems,
    actor_problems,
    attention_problems,
    critic_problems,
    precision_problems,
    process_problems,
    reference_problems,
    runner_problems,
    staleness_problems,
    trainable_problems,
    weight_sync_problems,
)
from embodied_rl.tasks.secrets import secret_problems
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.task import Task
from embodied_rl.tasks.unread import unread_keys

NO_EVAL_ENV: Final = "eval_env: its keys need an env to belong to; choose one, as eval_env=<a choice of env>"

_LONGEST_NAME: Final = 200
"""File systems take 255 bytes; the rest is for what is appended."""
_PATHS: Final = (
    "path",
    "bc_path",
    "demonstrations",
    "teacher",
    "resume_dir",
    "init_from",
    "output_dir",
    "video_base_dir",
    "experiment_name",
)
"""Last parts of keys whose values are paths."""


def build_config(raw: Mapping[str, Any], overridden: Sequence[str] = ()) -> Config:
    """Check ``raw`` and return it as a :class:`Config`.

    Args:
        raw: the resolved configuration as nested dicts and lists.
        overridden: the keys that the user set, dotted; those that the run would not read are refused.

    Raises:
        ConfigError: naming every problem found.
    """
    name = _task_name(raw)
    task = TASKS[name]
    foreign = set[str]().union(*map(_sections, TASKS)) - _sections(name)
    problems = [foreign_section(section, name) for section in raw if section in foreign and raw[section] is not None]
    if misfit := _model_misfit(raw, task):  # its section differs, and so would every further finding
        raise ConfigError([*problems, misfit])
    if isinstance(raw.get("eval_env"), Mapping) and "env_type" not in raw["eval_env"] and "eval_env" not in foreign:
        raise ConfigError([*problems, NO_EVAL_ENV])
    own = {section: content for section, content in raw.items() if section not in foreign}
    if isinstance(own.get("eval_env"), Mapping):
        own["eval_env"] = _with_shared_options(own["eval_env"], own["env"])
    lines = at(own, "cluster.component_placement")
    if isinstance(lines, Mapping):  # what is none stays for pydantic
        chosen = [key.removeprefix("cluster.component_placement.") for key in overridden]
        own["cluster"] = {**own["cluster"], "component_placement": later_lines_win(lines, chosen)}
    if lines == AUTO and at(own, "rollout.pipeline_stage_num"):  # the least, which what is chosen may exceed
        own["rollout"] = {**own["rollout"], "pipeline_stage_num": 1}
    try:
        config = validator(task.config).validate_json(json.dumps(own))
    except ValidationError as error:
        raise ConfigError([*problems, *describe(error, known_keys(task.config), own)]) from None
    problems += [*_path_problems(config), *secret_problems(config)]
    if problems:  # what follows looks into folders
        raise ConfigError(problems)
    problems += [*_rule_problems(config), *unread_keys(config, overridden)]
    if problems:
        raise ConfigError(problems)
    return config


def _with_shared_options(eval_env: Mapping[str, Any], env: Any) -> Mapping[str, Any]:
    """The section ``eval_env``. Options of ``env`` that it does not set hold for it too where both have the same
    simulator: a recipe asks for the pictures that its policy learned from."""
    if not isinstance(env, Mapping) or env.get("env_type") != eval_env["env_type"]:
        return eval_env
    return {**eval_env, "init_params": {**env["init_params"], **eval_env["init_params"]}}


def _task_name(raw: Mapping[str, Any]) -> str:
    """The run's task.

    Raises:
        ConfigError: there is no such task.
    """
    name = at(raw, "runner.task_type")
    if not isinstance(name, str) or name not in TASKS:
        near = suggestion(str(name), TASKS)
        raise ConfigError([f"runner.task_type: got {name!r}, expected one of {', '.join(TASKS)}.{near}"])
    return str(name)


def _model_misfit(raw: Mapping[str, Any], task: Task) -> str:
    """The message for a model of another task."""
    name = at(raw, "model.model_type")
    if not isinstance(name, str) or name not in MODELS or (name in LANGUAGE_MODELS) == task.language:
        return ""
    if task.language:
        return f"model.model_type: got {name!r}, which acts in an env; use a language model, such as model=tiny_lm"
    return f"model.model_type: got {name!r}, a language model, which does not act in an env; use another, or task=math"


def _sections(task: str) -> set[str]:
    """The top-level sections of a task."""
    return {field.name for field in dataclasses.fields(TASKS[task].config)}


def foreign_section(key: str, task: str) -> str:
    """The message for a key or group of another task than ``task``; empty where it is of no other task."""
    section = key.split(".")[0]
    others = [name for name in TASKS if section in _sections(name) and name != task]
    if section in _sections(task) or not others:
        return ""
    tasks = " or ".join(f"task={name}" for name in others)
    return f"{key}: task={task} has no {section} and would not read it; leave it out, or use {tasks}"


def known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for name, kind in _annotations(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from known_keys(kind, f"{prefix}{name}.")


@functools.cache
def _annotations(schema: type) -> Mapping[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


# Rules across fields. Each yields what was got, why it cannot be, and what to do.


def _rule_problems(c: Config) -> Iterator[str]:
    yield from _name_problems(c)
    task, placement = TASKS[c.runner.task_type], None
    try:
        placement = placement_of(c)
    except PlacementError as error:
        yield f"cluster.component_placement: {error}"
    yield from process_problems(c, placement)
    if task.arithmetic is not None:
        if placement and c.cluster.backend == "serial" and placement.world_size("actor") > 1:
            yield (
                f"cluster.backend=serial: got {placement.world_size('actor')} actor ranks, but one process is one "
                "rank; use cluster=process, or cluster.component_placement.actor=0"
            )
        yield from actor_problems(c, placement)
        yield from runner_problems(c)
        yield from staleness_problems(c)
        yield from precision_problems(c)
        yield from reference_problems(c)
        yield from weight_sync_problems(c, placement)
        yield from algorithm_problems(c)
        yield from critic_problems(c)
    yield from attention_problems(c, placement)
    yield from trainable_problems(c)
    yield from acting_problems(c)
    yield from task.rules(c, placement)


def _path_problems(c: Config) -> Iterator[str]:
    """Problems of paths that no file system has."""
    for key, value in flat(dataclasses.asdict(c)):
        if key.rpartition(".")[2] not in _PATHS or not isinstance(value, str):
            continue
        if not value.isprintable() or any(len(part.encode()) > _LONGEST_NAME for part in value.split("/")):
            yield (
                f"{key}: got {value!r:.80}, expected a path of printable characters with names of at most "
                f"{_LONGEST_NAME} bytes"
            )


def _folder_problems(c: Config) -> Iterator[str]:
    """Problems of where the run would write."""
    name, folder = c.runner.experiment_name, Path(c.runner.output_dir)
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        yield (
            f"runner.experiment_name: got {name!r}, expected a name, or a/b: a folder below runner.output_dir; set "
            "runner.output_dir to write elsewhere"
        )
    if not c.runner.output_dir:
        yield "runner.output_dir: got '', expected a folder; . is the present one"
    there = next(path for path in (folder, *folder.parents, Path()) if path.exists())
    if not there.is_dir():
        yield f"runner.output_dir: got {folder}, but {there} is no folder; choose another"


def _name_problems(c: Config) -> Iterator[str]:
    yield from _folder_problems(c)
    yield from backend_problems(c.runner.logger.logger_backends, c.runner.logger.params)
    if problem := MODELS.problem(c.model.model_type):  # no more than that: the module itself may import torch
        yield problem
    adapters = c.model.lora.path
    if adapters is not None and not (Path(adapters) / "adapter_config.json").is_file():
        yield (
            f"model.lora.path: got {adapters}, which has no adapter_config.json; expected a folder of adapters in "
            "peft's format"
        )
    components = TASKS[c.runner.task_type].components
    if missing := set(components) - set(c.cluster.num_threads):
        yield f"cluster.num_threads: no entry for {', '.join(sorted(missing))}; add cluster.num_threads.<component>=1"
    for key in ("num_threads", "cpu_affinity", "env_vars"):
        for name in set(getattr(c.cluster, key)) - set(components):
            yield (
                f"cluster.{key}.{name}: no such component, expected one of {', '.join(components)}."
                f"{suggestion(name, components)}"
            )
