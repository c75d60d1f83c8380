"""Errors a user can act on: the command line prints their message without a traceback."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Base class: the message says what was got, what was expected and what to do."""


class ConfigError(UserError):
    """The configuration is wrong in one or several places, all of them in the message."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        title = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        super().__init__(title + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or does not fit the run."""


class WeightSyncError(RuntimeError):
    """A rollout worker has no whole version of the weights, or not the one that the actor sent."""


def first_line(error: object) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def place_of(error: BaseException) -> str:
    """Where it was raised: ``my_env.py, line 3, in step``."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the system had no memory left. Torch's own error is known by its name: no import of torch."""
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def listed(items: Iterable[str], most: int = 6, separator: str = ", ") -> str:
    """Items for a message, not too many of them: ``a, b and 3 more``."""
    found = list(items)
    shown = separator.join(found[:most])
    before_rest = separator if separator.isspace() else " "
    return f"{shown}{before_rest}and {len(found) - most} more" if len(found) > most else shown


def suggestion(name: str, choices: Iterable[str], cutoff: float = 0.5, prefix: str = "") -> str:
    """``" Did you mean 'x'?"`` for the nearest of ``choices`` (similar by ``cutoff`` or more) after ``prefix``, or an
    empty string."""
    folded = {choice.casefold(): choice for choice in choices}
    nearest = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=cutoff)
    return f" Did you mean {prefix + folded[nearest[0]]!r}?" if nearest else ""
