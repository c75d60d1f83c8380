"""The command line: Hydra -> checked :class:`Config` -> launch. Nothing below it sees a DictConfig."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.schema import Config

CONFIG_MODULE = "embodied_rl.config"
GROUPS = ("task", "env", "model", "algorithm", "cluster", "logger", "experiment")
USAGE_ERROR = 2
"""Exit status of a command line or configuration that is wrong."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``train.py`` and ``embodied-rl``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv[1:] = arguments
    try:
        if problems := _override_problems(arguments):
            raise ConfigError(problems)
        _hydra_main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="train")
def _hydra_main(composed: DictConfig) -> None:
    try:
        config = from_hydra(composed, _value_keys(hydra.core.hydra_config.HydraConfig.get().overrides.task))
        from embodied_rl.launch import run  # imports torch, so only once the configuration is known to be right

        run(config)
    except UserError as error:  # here and not only in main: Hydra would wrap it in a traceback of its own
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def from_hydra(composed: DictConfig, overridden: Sequence[str] = ()) -> Config:
    """Resolve and check a composed configuration.

    Raises:
        ConfigError: naming every problem found.
    """
    from embodied_rl.validation import build_config

    try:
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{getattr(error, 'full_key', None) or 'configuration'}: {error.args[0]}"]) from None
    return build_config(raw, overridden)


def _parse(arguments: Sequence[str]) -> list[Override]:
    """The overrides among ``arguments``; flags and what Hydra itself must complain of are left to Hydra."""
    texts = [text for text in arguments if not text.startswith("-") and "=" in text or text.startswith("~")]
    try:
        return OverridesParser.create().parse_overrides(texts)
    except HydraException:
        return []


def _value_keys(arguments: Sequence[str]) -> list[str]:
    """The dotted keys that the user set, group choices left out."""
    return [o.key_or_group for o in _parse(arguments) if o.key_or_group.split("@")[0].split("/")[0] not in GROUPS
            or "." in o.key_or_group]  # fmt: skip


def _override_problems(arguments: Sequence[str]) -> list[str]:
    """Problems of the command line that Hydra would report one at a time and without a suggestion."""
    if any(text in ("-h", "--help", "--hydra-help", "--version", "-m", "--multirun") for text in arguments):
        return []
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from embodied_rl.validation import unknown_key

    overrides = [o for o in _parse(arguments) if not o.key_or_group.startswith("hydra")]
    choices = [o for o in overrides if o.key_or_group in GROUPS]
    problems: list[str] = []
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            for choice in choices:
                options = [name for name in loader.get_group_options(choice.key_or_group) if name != "base"]
                if isinstance(choice.value(), str) and choice.value() not in options:
                    problems.append(
                        f"{choice.key_or_group}={choice.value()}: no such choice, expected one of {', '.join(options)}."
                        f"{suggestion(str(choice.value()), options)}"
                    )
            if problems:
                return problems
            composed = compose("train", overrides=[o.input_line for o in choices if o.input_line])
    except HydraException:
        return problems  # Hydra says it better, in the real run
    for override in overrides:
        key = override.key_or_group
        if override in choices or override.is_add() or "@" in key or "/" in key:
            continue
        if _has_key(composed, key) or _free_form(key):
            continue
        known = [*_leaf_keys(composed), *GROUPS]
        problems.append(unknown_key(key, known))
    return problems


def _free_form(key: str) -> bool:
    """Sections whose keys belong to an adapter or a model, checked against its own ``Params``."""
    return key.startswith(("env.init_params.", "model.params.", "runner.logger.wandb."))


def _has_key(config: DictConfig, key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node.keys():  # noqa: SIM118: `in` asks for a set value
            return False
        node = node._get_node(part)
    return True


def _leaf_keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in config:
        node = config._get_node(name)
        keys.append(f"{prefix}{name}")
        if isinstance(node, DictConfig) and not node._is_none():
            keys.extend(_leaf_keys(node, f"{prefix}{name}."))
    return keys


if __name__ == "__main__":
    main()
