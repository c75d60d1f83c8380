"""The commands that README and docs show, and what a page says of how they are tested.

A block as it is is checked, not run. Comments on the lines before it, which no reader sees, say more:

    <!-- run: runner.max_steps=1 -->     run it, with these overrides behind those of every training command
    <!-- needs: vllm -->                 leave it out where this module is not installed
    <!-- walk -->                        a part of scripts/new_user_walk.py, which another test runs
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(page.relative_to(ROOT) for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
SHELL = ("bash", "console")
"""Languages of blocks that hold commands; in a ``console`` those after a prompt, each with its output."""

_BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- (\w+):? ?(.*?) ?-->$", re.MULTILINE)
_MARKS = {"run", "needs", "walk"}
_INLINE = re.compile(r"`((?:python|embodied-rl) [^`\n…]+)`")
_HEREDOC = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a command within a sentence."""

    page: Path
    line: int
    language: str
    text: str
    run: str | None = None
    """The overrides that make its training commands short; None: not to be run."""
    needs: tuple[str, ...] = ()
    """Modules without which it can be neither run nor checked."""
    walk: bool = False
    """It needs what earlier blocks of its page made."""

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without prompt, environment variables and comment."""
        for line in _HEREDOC.sub("", self.text).replace("\\\n", " ").splitlines():
            if self.language == "console" and not line.startswith("$ "):
                continue
            for command in line.removeprefix("$ ").split(" && "):
                words = shlex.split(command, comments=True)
                while words and _VARIABLE.match(words[0]):
                    words.pop(0)
                if words:
                    yield words


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in its order.

    Raises:
        ValueError: a comment before a block is no mark that is known.
    """
    found: list[Block] = []
    text = (ROOT / page).read_text()
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2)) + 1
        marks = dict(_MARK.findall(block[1]))
        if unknown := marks.keys() - _MARKS:
            raise ValueError(f"{page}:{line}: got {', '.join(sorted(unknown))}, expected {' or '.join(sorted(_MARKS))}")
        needs = tuple(marks.get("needs", "").replace(",", " ").split())
        found.append(Block(page, line, block[2], block[3], marks.get("run"), needs, walk="walk" in marks))
    return found


def inline(page: Path) -> list[Block]:
    """The commands within a page's sentences and tables."""
    text = (ROOT / page).read_text()
    outside = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    return [Block(page, outside.count("\n", 0, m.start()) + 1, "bash", m[1]) for m in _INLINE.finditer(outside)]
