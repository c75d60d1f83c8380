"""Arguments, output and folders of the commands, and the findings of checks."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from embodied_rl.errors import UserError, suggestion
from embodied_rl.files import atomic

PIPED_WIDTH: Final = 120
"""Columns where there is no terminal to ask."""
Status = Literal["ok", "warning", "problem"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's arguments. A mistake is a :class:`UserError` with the usage.

    Args:
        usage: the command line in short.
        description: the rest of the help, with the options.
        settings: options that may be written ``name=value``, as for a run -> their values; None: any.
    """

    def __init__(
        self, usage: str, description: str, settings: Mapping[str, Sequence[str] | None] | None = None
    ) -> None:
        super().__init__(usage=usage, description=description, allow_abbrev=False)
        self._settings = settings or {}
        for name, choices in self._settings.items():
            self.add_argument(f"--{name}", choices=choices)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of all arguments.

        Raises:
            UserError: something is missing, too much, or unknown.
        """
        return self.parse_intermixed_args([self._as_option(argument) for argument in arguments])

    def _as_option(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not self._settings or not equals or argument.startswith("-"):
            return argument
        if name not in self._settings:
            self.error(f"{argument}: no such option.{suggestion(name, self._settings)}".removesuffix("."))
        if not value:
            self.error(f"{name}: got '', expected a value")
        return f"--{argument}"

    def format_help(self) -> str:
        """The usage and the description as it is written, which has the options."""
        return f"{self.format_usage()}{self.description}"

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage()}".rstrip())


def console(piped_width: int = PIPED_WIDTH) -> Console:
    """Standard output, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else piped_width, highlight=False)


@contextlib.contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A hidden neighbour to write to; it becomes ``directory`` when the block ends well, and is removed when not.

    Raises:
        UserError: ``directory`` exists already, with something in it, or cannot be made.
    """
    refuse_existing(directory)
    try:
        with atomic(directory) as scratch:
            scratch.mkdir()
            yield scratch
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error}") from error


def refuse_existing(directory: Path) -> None:
    """Go on only if ``directory`` can be made.

    Raises:
        UserError: it exists already, with something in it.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise UserError(f"{directory}: exists already; give a folder that does not, or an empty one")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    what: str
    """The subject of the check, in a word or two."""
    text: str
    """The result in words."""
    advice: str = ""
    """The remedy."""


ok: Final = partial(Finding, "ok")
warning: Final = partial(Finding, "warning")
problem: Final = partial(Finding, "problem")


class ProblemError(Exception):
    """A problem that ends a check."""

    def __init__(self, what: str, text: str, advice: str) -> None:
        super().__init__(text)
        self.finding = problem(what, text, advice)


def until_problem(check: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a check; a :class:`ProblemError` that ends it is its last one."""
    try:
        yield from check
    except ProblemError as error:
        yield error.finding


def show(console: Console, title: str, findings: Iterable[Finding]) -> int:
    """Print findings as a table; returns the exit status: 1 where there is a problem."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    status = 0
    for finding in findings:
        if finding.status == "problem":
            status = 1
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="italic")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.what), text)
    console.print(table)
    return status
