"""The command line: arguments -> checked :class:`Config` -> plan -> launch. Nothing below it sees a DictConfig."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from embodied_rl import __version__
from embodied_rl.command_line import check_grammar, checked
from embodied_rl.commands import COMMANDS
from embodied_rl.composition import config_of, from_hydra, understood, value_keys, with_recipe
from embodied_rl.config import CONFIG_MODULE
from embodied_rl.errors import UserError, suggestion
from embodied_rl.registry import load_function
from embodied_rl.runtime.signals import said
from embodied_rl.runtime.worker import StallError, WorkerError
from embodied_rl.schema import Config
from embodied_rl.tasks.planning import plan_of

__all__ = ["config_of", "main"]

USAGE_ERROR = 2
"""Exit status of a command line or configuration that is wrong."""
WORKER_ERROR = 1
"""Exit status of a run in which a worker failed or died."""
STALL = 3
"""Exit status of a run whose workers gave no sign of life for too long."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``train.py`` and ``embodied-rl``."""
    with said():
        _main(list(sys.argv[1:] if argv is None else argv))


def _main(given: Sequence[str]) -> None:
    if given == ["--version"]:  # Hydra would print its own
        print(f"embodied_rl {__version__}")
        return
    if str(Path.cwd()) not in sys.path and "" not in sys.path:  # the installed command sees modules of one's own, too
        sys.path.append(str(Path.cwd()))
    is_run = not (given and given[0][:1].isalpha() and "=" not in given[0])  # neither an option nor an override
    if is_run:
        given = with_recipe(given)
    arguments = understood(given)
    sys.argv[1:] = arguments
    try:
        if _asks_for_help(given):
            load_function("command", {"--help": "embodied_rl.commands.help:main"}, "--help")(given)
            return
        if not is_run:
            if status := _command(given[0])(given[1:]):
                sys.exit(status)
            return
        if any(map(_is_hydras, arguments)):
            check_grammar([text for text in arguments if "=" in text and not text.startswith("-")])
            _hydra_main()
        else:
            _run(checked(given), given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


_EVALUATE: Final = " An evaluation is a run with runner.only_eval=true runner.resume_dir=<its checkpoint>"
_INSTEAD: Final = {
    "train": " Training is what is done without a command",
    "eval": _EVALUATE,
    "evaluate": _EVALUATE,
    "resume": " A run goes on with runner.resume_dir=<its directory>",
}
"""Commands of other programs."""


def _command(name: str) -> Callable[[Sequence[str]], int | None]:
    if name not in COMMANDS:
        instead = _INSTEAD.get(name, suggestion(name, COMMANDS))
        raise UserError(
            f"{name}: no such command, expected one of {', '.join(COMMANDS)}, or group=choice and key=value for a run."
            f"{instead}"
        )
    return load_function("command", COMMANDS, name)


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """For a run's; a command, which comes first, has its own."""
    is_command = bool(arguments) and arguments[0] in COMMANDS
    return not is_command and any(argument in ("--help", "-h") for argument in arguments)


def _is_hydras(argument: str) -> bool:
    """Whether Hydra itself must see the argument: help, a sweep, a configuration to print, or its own settings."""
    folders = argument.startswith(("--config-dir", "-cd", "hydra.searchpath="))
    return not folders and argument.startswith(("-", "hydra.", "+hydra.", "~hydra."))


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="train")
def _hydra_main(composed: DictConfig) -> None:
    try:
        config = from_hydra(composed, value_keys(HydraConfig.get().overrides.task))
    except UserError as error:  # here and not only in main: Hydra would wrap it in a traceback of its own
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    _run(config, HydraConfig.get().overrides.task)


def _run(config: Config, command: Sequence[str]) -> None:
    try:
        plan = plan_of(config)
        from embodied_rl.launch import carry_out  # imports torch, so only once the configuration is known to be right

        carry_out(plan, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except WorkerError as error:  # its text is the worker's own traceback; ours would only hide it
        print(f"error: {error}", file=sys.stderr)
        sys.exit(STALL if isinstance(error, StallError) else WORKER_ERROR)


if __name__ == "__main__":
    main()
