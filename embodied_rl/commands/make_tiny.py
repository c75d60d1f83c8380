"""``python train.py make-tiny model=<name> <folder>``: a folder in a model's published layout that a CPU can train."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import rich

from embodied_rl.commands.terminal import CommandParser, new_folder, refuse_existing
from embodied_rl.errors import UserError
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS, policy_class
from embodied_rl.params import argument

USAGE: Final = "python train.py make-tiny model=<name> <folder>"
HELP: Final = """
Writes a folder with the files, names and tokenizer of the model's published ones, small sizes and random weights, for
model.path=<folder>: to try a model, a configuration or a test without its weights.
"""
_METHOD: Final = "write_tiny"


def main(arguments: Sequence[str]) -> None:
    """Write as the arguments say, and print how to use the result.

    Raises:
        UserError: of :func:`make_tiny`, or wrong arguments.
    """
    parser = CommandParser(USAGE, HELP, settings={"model": None})
    parser.add_argument("output", type=Path, metavar="<folder>")
    given = parser.parse(arguments or ["--help"])
    if given.model is None:
        parser.error("missing: model=<name>")
    make_tiny(given.model, given.output)
    task = "task=math " if given.model in LANGUAGE_MODELS else ""
    path = shlex.quote(argument("model.path", str(given.output)))
    hint = f"use it with: {task}model={given.model} {path}"
    rich.get_console().print(hint, highlight=False, soft_wrap=True, markup=False)


def make_tiny(model: str, output: Path) -> None:
    """Write a tiny folder of a model (a name in ``models/registry.py``, or ``module:Class``).

    Raises:
        UserError: no such model, or one without published layout; or the output cannot be written.
    """
    refuse_existing(output)
    write = getattr(policy_class(model), _METHOD, None)
    if write is None:
        able = [name for name in sorted(MODELS) if hasattr(policy_class(name), _METHOD)]
        raise UserError(
            f"model={model}: is made fresh without a folder (leave model.path out), so there is no tiny one; expected "
            f"one of {', '.join(able)}"
        )
    with new_folder(output) as scratch:
        write(scratch)
