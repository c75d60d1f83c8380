"""Findings of checks, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "problem"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


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
    """Print them; returns the exit status: 1 where there is a problem."""
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
