"""What a check found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "problem"]
_STYLES: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    status: Status
    what: str
    """What was looked at, in a word or two."""
    text: str
    """What was found."""
    advice: str = ""
    """What to do about it."""


def ok(what: str, text: str, advice: str = "") -> Finding:
    return Finding(status="ok", what=what, text=text, advice=advice)


def warning(what: str, text: str, advice: str = "") -> Finding:
    return Finding(status="warning", what=what, text=text, advice=advice)


def problem(what: str, text: str, advice: str = "") -> Finding:
    return Finding(status="problem", what=what, text=text, advice=advice)


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


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a message, not too many of them."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
