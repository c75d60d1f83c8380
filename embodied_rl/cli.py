"""The command line: Hydra -> checked :class:`Config` -> launch. Nothing below it sees a DictConfig."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from embodied_rl.commands import COMMANDS
from embodied_rl.config import CONFIG_MODULE, GROUPS
from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.models.weights.shipped import register_resolvers
from embodied_rl.params import unknown_key
from embodied_rl.registry import load_function
from embodied_rl.runtime.placement import separate_overrides
from embodied_rl.runtime.worker import WorkerError
from embodied_rl.schema import Config
from embodied_rl.tasks.planning import plan_of
from embodied_rl.tasks.validation import build_config, foreign_section

FREE_FORM = (
    "algorithm.params.",
    "collect.expert_params.",
    "env.init_params.",
    "data.params.",
    "reward.params.",
    "model.params.",
    "rollout.engine_kwargs.",
    "runner.logger.params.",
    "runner.logger.wandb.",
)
"""Sections whose keys belong to an adapter, a data set, a model, ..., and are checked by their owner."""
USAGE_ERROR = 2
"""Exit status of a command line or configuration that is wrong."""
WORKER_ERROR = 1
"""Exit status of a run in which a worker failed or died."""
_UNCHECKED = {
    *("-h", "--help", "--hydra-help", "--version"),
    *("-m", "--multirun"),
    *("-cn", "--config-name", "-cp", "--config-path"),
}
"""Options with which Hydra composes no single configuration, or one of the user's own."""

register_resolvers()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``train.py`` and ``embodied-rl``."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _understood(given)
    sys.argv[1:] = arguments
    try:
        if given and given[0][:1].isalpha() and "=" not in given[0]:  # no option, no override
            if status := _command(given[0])(given[1:]):
                sys.exit(status)
            return
        if problems := _problems(arguments):
            raise ConfigError(problems)
        _hydra_main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as ending:
        if ending.code == 128 + signal.SIGTERM:
            print("terminated", file=sys.stderr)
        raise


def _command(name: str) -> Callable[[Sequence[str]], int | None]:
    if name not in COMMANDS:
        raise UserError(
            f"{name}: no such command, expected one of {', '.join(COMMANDS)}, or group=choice and key=value for a run."
            f"{suggestion(name, COMMANDS)}"
        )
    return load_function("command", COMMANDS, name)


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="train")
def _hydra_main(composed: DictConfig) -> None:
    try:
        config = from_hydra(composed, _value_keys(HydraConfig.get().overrides.task))
        plan = plan_of(config)
        from embodied_rl.launch import carry_out  # imports torch, so only once the configuration is known to be right

        carry_out(plan)
    except UserError as error:  # here and not only in main: Hydra would wrap it in a traceback of its own
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except WorkerError as error:  # its text is the worker's own traceback; ours would only hide it
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WORKER_ERROR)


def config_of(*overrides: str) -> Config:
    """The checked configuration of ``python train.py <overrides>``, for scripts, notebooks and tests.

    Raises:
        ConfigError: naming every problem found.
        UserError: the folder of ``--config-dir`` does not exist.
    """
    given, folders = _own_folders(_understood(overrides))
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        composed = compose("train", overrides=[*given, *folders])
    return from_hydra(composed, _value_keys(given))


def from_hydra(composed: DictConfig, overridden: Sequence[str] = ()) -> Config:
    """Resolve and check a composed configuration.

    Raises:
        ConfigError: naming every problem found.
    """
    try:
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: missing; set it with {error.full_key}=..."]) from None
    except OmegaConfBaseException as error:
        raise ConfigError([f"{getattr(error, 'full_key', None) or 'configuration'}: {error.args[0]}"]) from None
    return build_config(raw, overridden)


def _parse(arguments: Sequence[str]) -> list[Override]:
    """The overrides among ``arguments``; flags and what Hydra itself must complain of are left to Hydra."""
    texts = [text for text in arguments if (not text.startswith("-") and "=" in text) or text.startswith("~")]
    try:
        return OverridesParser.create().parse_overrides(texts)
    except HydraException:
        return []


def _value_keys(arguments: Sequence[str]) -> list[str]:
    """The dotted keys that the user set, group choices left out."""
    return [o.key_or_group for o in _parse(arguments) if "." in o.key_or_group and "@" not in o.key_or_group]


def _own_folders(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without those that name folders of the user's own YAML, and the one override that names these.

    Raises:
        UserError: the folder of ``--config-dir`` does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", "-c")  # unknown, -c would be taken for the beginning of -cd
    options, rest = parser.parse_known_args(arguments)
    searchpath = [o for o in _parse(rest) if o.key_or_group == "hydra.searchpath"]
    values: list[Any] = [override.value() for override in searchpath]
    folders = [folder for value in values if isinstance(value, list) for folder in value]
    if options.config_dir is not None:
        if not options.config_dir.is_dir():
            raise UserError(f"--config-dir {options.config_dir}: no such directory")
        folders.insert(0, f"file://{options.config_dir.resolve()}")
    others = [text for text in rest if text not in [override.input_line for override in searchpath]]
    return others, [f"hydra.searchpath={json.dumps(folders, ensure_ascii=False)}"] if folders else []


def _problems(arguments: Sequence[str]) -> list[str]:
    """Everything that is wrong with the command line, where Hydra would stop at the first and suggest nothing."""
    if any(text.partition("=")[0] in _UNCHECKED for text in arguments):
        return []
    given, folders = _own_folders(arguments)
    overrides = [o for o in _parse(given) if not o.key_or_group.startswith("hydra")]
    choices = [o for o in overrides if o.key_or_group in GROUPS]
    problems: list[str] = []
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            for choice in choices:
                options = [
                    name for name in loader.get_group_options(choice.key_or_group, overrides=folders) if name != "base"
                ]
                value = choice.value()
                if value is None and not choice.is_delete():
                    problems.append(
                        f"{choice.key_or_group}=null: no such choice, expected one of {', '.join(options)}; to have "
                        f"none, choose a task that needs no {choice.key_or_group}"
                    )
                elif isinstance(value, str) and value not in options:
                    problems.append(
                        f"{choice.key_or_group}={value}: no such choice, expected one of {', '.join(options)}."
                        f"{suggestion(value, options)}"
                    )
            if problems:
                return problems
            groups_only = compose("train", overrides=[*folders, *(o.input_line for o in choices if o.input_line)])
            known = []
            for override in overrides:
                key = override.key_or_group
                added = override.is_add() or override.is_force_add()
                plain = override not in choices and not added and "@" not in key and "/" not in key
                if plain and not _has_key(groups_only, key):
                    problems.append(
                        foreign_section(key, groups_only.runner.task_type)
                        or unknown_key(key, [*_all_keys(groups_only), *GROUPS])
                    )
                elif override.input_line:
                    known.append(override.input_line)
            from_hydra(compose("train", overrides=[*folders, *known]), _value_keys(known))
    except HydraException:
        return problems  # Hydra says it better, in the real run
    except ConfigError as error:
        problems += error.problems
    return problems


def _understood(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra wants them. ``task=sft`` imitates language, and together with an env what was done in it:
    then it means ``task=embodied_sft``."""
    acts = any(text.startswith("env=") for text in arguments)
    plain = [part for text in arguments for part in separate_overrides(text)]
    return ["task=embodied_sft" if acts and text == "task=sft" else _settable(text) for text in plain]


def _settable(argument: str) -> str:
    """Let adapters' and models' own options be set like any other: Hydra wants ``++`` for keys not in its YAML."""
    return f"++{argument}" if argument.startswith(FREE_FORM) and "=" in argument else argument


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


if __name__ == "__main__":
    main()
