"""``python train.py doctor [<folder>]``: what a folder is, whether it is whole, and how to use it; without one, whether
the installation is in order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from embodied_rl.checkpoints.store import resolve
from embodied_rl.commands.arguments import HELP as HELP_FLAGS
from embodied_rl.commands.arguments import parse
from embodied_rl.commands.checkpoint_folder import checkpoint_findings, is_checkpoint, is_run, run_findings
from embodied_rl.commands.findings import Finding, listed, show
from embodied_rl.commands.weights_folder import ADAPTER_CONFIG, CONFIG_FILE, adapter_findings, weights_findings
from embodied_rl.errors import UserError

USAGE: Final = "python train.py doctor [<folder>]"
HELP: Final = f"""{USAGE}

With a folder: of weights (model.path), of adapters (model.lora.path), a checkpoint or a run directory. Says what it
is, what is missing, and how to use it.
Without: checks the installation: packages, simulators, rendering, accelerators, memory.

The exit status is 1 if there is a problem.
"""
PIPED_WIDTH: Final = 120
"""Columns where there is no terminal to ask."""


def main(arguments: Sequence[str]) -> int:
    """Check as the arguments say; returns the exit status.

    Raises:
        UserError: there is no such folder, or nothing in it that is known.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    if any(argument in HELP_FLAGS for argument in arguments):
        console.print(HELP, markup=False, soft_wrap=True)
        return 0
    folders, _ = parse(arguments, usage=USAGE, places=["a folder"], optional=1, options={})
    if folders:
        return show(console, folders[0], folder_findings(Path(folders[0])))
    from embodied_rl.commands.installation import installation_findings

    return show(console, "installation", installation_findings())


def folder_findings(folder: Path) -> Iterable[Finding]:
    """The checks for what the folder is.

    Raises:
        UserError: it does not exist, or is nothing that is known.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'is no folder' if folder.exists() else 'no such folder'}")
    if is_checkpoint(folder):
        return checkpoint_findings(folder)
    if (folder / CONFIG_FILE).is_file():
        return weights_findings(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return adapter_findings(folder)
    if is_run(folder):
        return run_findings(folder)
    try:
        newest = resolve(str(folder), folder)  # an experiment's directory
    except UserError:
        newest = None
    if newest is not None:
        return run_findings(newest.parent.parent)
    found = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise UserError(
        f"{folder}: holds {found}; expected {CONFIG_FILE} (weights), {ADAPTER_CONFIG} (adapters), state.json (a "
        "checkpoint) or checkpoints/ (a run)"
    )
