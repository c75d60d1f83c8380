"""What a command line says: every mistake in it, explained, and the file that sets each key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from hydra import compose
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from embodied_rl.composition import (
    choices_of,
    config_of,
    folders_of,
    from_hydra,
    hydra_of_our_own,
    own_folders,
    parsed,
    understood,
    value_keys,
)
from embodied_rl.config import GROUPS
from embodied_rl.errors import ConfigError, UserError, listed, suggestion
from embodied_rl.params import unknown_key
from embodied_rl.schema import Config
from embodied_rl.tasks.validation import NO_EVAL_ENV, foreign_section

COMMAND_LINE = "command line"
"""Where a key comes from that no file sets."""

_BASES: Final = {"env": "base/common@_here_", "algorithm": "base"}
"""Group -> the file that its files begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where the configuration comes from."""

    files: tuple[str, ...]
    """Its files in the order in which later ones win, such as ``env/base/common``."""
    keys: dict[str, str]
    """Dotted key -> the file that sets it last, or :data:`COMMAND_LINE`."""


def checked(arguments: Sequence[str]) -> Config:
    """As :func:`config_of`, for a user's command line: every mistake in it is named, with what may be meant.

    Raises:
        ConfigError: naming every problem found.
        UserError: the folder of ``--config-dir`` does not exist, a file is no YAML, or the command line is wrong in a
            way that Hydra explains best.
    """
    try:
        return config_of(*arguments)
    except yaml.YAMLError as error:
        raise UserError(f"a configuration file is no YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(_with_origins(_of_own_files(error.problems, arguments), arguments)) from None
    except (HydraException, ValueError) as error:  # the latter where a group is null
        if isinstance(error, UserError):
            raise
        check_grammar([text for text in own_folders(understood(arguments))[0] if not text.startswith("-")])
        if problems := problems_of(understood(arguments)):
            raise ConfigError(_of_own_files(problems, arguments)) from None
        if isinstance(error, HydraException):
            raise UserError(str(error)) from error
        raise


def problems_of(arguments: Sequence[str]) -> list[str]:
    """Everything that is wrong with the command line, where Hydra would stop at the first and suggest nothing."""
    given, folders = own_folders(arguments)
    overrides = [o for o in parsed(given) if not o.key_or_group.startswith("hydra")]
    chosen = [o for o in overrides if o.key_or_group in GROUPS]
    problems: list[str] = []
    try:
        with hydra_of_our_own():
            for choice in chosen:
                options = choices_of(choice.key_or_group, folders)
                value, group = choice.value(), choice.package or choice.key_or_group
                if value is None and not choice.is_delete() and group in GROUPS:
                    problems.append(
                        f"{group}=null: no such choice, expected one of {', '.join(options)}; to have none, choose a "
                        f"task that needs no {group}"
                    )
                elif isinstance(value, str) and value not in options:
                    problems.append(
                        f"{group}={value}: no such choice, expected one of {', '.join(options)}."
                        f"{suggestion(value, options)}{_hint(group, value)}"
                    )
            if problems:
                return problems
            groups_only = compose("train", overrides=[*folders, *(o.input_line for o in chosen if o.input_line)])
            known = []
            for override in overrides:
                key = override.key_or_group
                added = override.is_add() or override.is_force_add()
                plain = override not in chosen and not added and "@" not in key and "/" not in key
                if plain and not _has_key(groups_only, key):
                    problems.append(
                        foreign_section(key, groups_only.runner.task_type)
                        or (NO_EVAL_ENV if key.startswith("eval_env.") and "eval_env" not in groups_only else "")
                        or _unknown(key, [*_all_keys(groups_only), *GROUPS])
                    )
                elif override.input_line:
                    known.append(override.input_line)
            from_hydra(compose("train", overrides=[*folders, *known]), value_keys(known))
    except HydraException:
        return problems  # Hydra says it better, in the real run
    except ConfigError as error:
        problems += error.problems
    return problems


def _unknown(key: str, known: Sequence[str]) -> str:
    from embodied_rl.elsewhere import ours_for  # reads the other systems' keys

    ours = ours_for(key, known)
    return f"{key}: no such key.{ours}" if ours else unknown_key(key, known)


def _hint(group: str, value: str) -> str:
    """What else a name may be that no file has."""
    if group in ("env", "eval_env") and re.search(r"-v\d+$", value):
        return f" An id of Gymnasium is {group}=gymnasium {group}.init_params.id={value}"
    return f" A file of your own, <folder>/{group}/{value}.yaml, is found with --config-dir <folder>"


def check_grammar(arguments: Sequence[str]) -> None:
    """See that Hydra can read each of these overrides.

    Raises:
        ConfigError: naming all that it cannot read.
    """
    parser = OverridesParser.create()
    problems: list[str] = []
    for text in arguments:
        if "=" not in text and not text.startswith("~"):
            problems.append(f"{text!r}: expected group=choice or key=value")
            continue
        try:
            parser.parse_override(text)
        except HydraException:
            problems.append(
                f"{text.lstrip('+')!r}: cannot be read as key=value; a value with spaces, commas, brackets, quotes, = "
                "or letters beyond ASCII needs quotes within the shell's: 'key=\"a, b\"'; a key has none of them"
            )
    if problems:
        raise ConfigError(problems)


def origins(arguments: Sequence[str]) -> Origins:
    """Which file sets which key of a command line's configuration."""
    given, folders = own_folders(understood(arguments))
    with hydra_of_our_own():
        used = _used(given, folders)
        composed = compose("train", overrides=[*given, *folders])
        found: dict[str, str] = {}
        for item in used:
            found |= dict.fromkeys(_keys_of(item, folders), str(item.config_path))
    found |= dict.fromkeys(value_keys(given), COMMAND_LINE)
    known = {key: found[key] for key in _all_keys(composed) if key in found}
    return Origins(files=tuple(str(item.config_path) for item in used), keys=known)


def _used(given: Sequence[str], folders: Sequence[str]) -> list[ResultDefault]:
    """The files of a command line's configuration, Hydra's own left out; within :func:`hydra_of_our_own`."""
    loader = GlobalHydra.instance().config_loader()
    items = loader.compute_defaults_list("train", [*given, *folders], RunMode.RUN).defaults
    return [item for item in items if item.config_path and not item.config_path.startswith("hydra/")]


def _with_origins(problems: Sequence[str], arguments: Sequence[str]) -> Iterator[str]:
    """Name the file that sets an option of a simulator's which is wrong: it is not where the user would look."""
    pattern = re.compile(r"(eval_)?env\.init_params\.\w+(?=: )")
    keys = origins(arguments).keys if any(pattern.match(problem) for problem in problems) else {}
    for problem in problems:
        found = pattern.match(problem)
        file = keys.get(found[0], COMMAND_LINE) if found else COMMAND_LINE
        yield (
            problem if file == COMMAND_LINE or found is None else f"{found[0]} (set by {file}){problem[found.end() :]}"
        )


def _of_own_files(problems: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """One problem for a file of the user's own that lacks a line by which others become part of the configuration,
    instead of what follows from that."""
    rest = list(problems)
    given, folders = own_folders(understood(arguments))
    names: list[str] = []
    if folders:
        with hydra_of_our_own(), contextlib.suppress(HydraException):  # a file that does not exist is in the problems
            names = [str(item.config_path) for item in _used(given, folders)]
    for name in names:
        group = name.partition("/")[0]
        path = _file_of(name, folders_of(folders))
        if path is None or group == name:
            continue
        text = path.read_text()
        missing = [p.partition(":")[0] for p in rest if re.match(rf"(eval_)?{group}\.[\w.]+: missing;", p)]
        nested = [p for p in rest if re.match(rf"({group}\.)?{group}: no such key", p)]
        if nested and not re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE):
            rest = [p for p in rest if p not in nested and p.partition(":")[0] not in missing]
            rest.append(f"{path}: its keys are taken for {group}'s; put this line first: # @package _global_")
        elif len(missing) > 1 and group in _BASES and "defaults" not in OmegaConf.load(path):
            rest = [p for p in rest if p.partition(":")[0] not in missing]
            begin = f"defaults: [{_BASES[group]}, _self_]"
            rest.append(f"{path}: lacks {listed(missing)}; to have the group's defaults, begin with {begin}")
    return rest


def _file_of(name: str, roots: Sequence[Path]) -> Path | None:
    return next((file for root in roots if (file := root / f"{name}.yaml").is_file()), None)


def _keys_of(item: ResultDefault, folders: Sequence[str]) -> list[str]:
    """The dotted keys that a file of the defaults list sets."""
    path = _file_of(str(item.config_path), [Path(__file__).parent / "config", *folders_of(folders)])
    if path is None:  # a file of a plugin package
        return []
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    content.pop("defaults", None)
    package = "" if item.package in (None, "", "_global_") else f"{item.package}."
    return _all_keys(content, package)


def _has_key(config: DictConfig, key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node.keys():  # noqa: SIM118  # `in` asks for a set value
            return False
        node = node._get_node(part)
    return True


def _all_keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in config:
        node = config._get_node(name)
        keys.append(f"{prefix}{name}")
        if isinstance(node, DictConfig) and not node._is_none():
            keys.extend(_all_keys(node, f"{prefix}{name}."))
    return keys
