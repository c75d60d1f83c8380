"""Arguments of commands: places first, then ``key=value`` as for a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from embodied_rl.errors import UserError, suggestion

HELP = ("-h", "--help")


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the usage is asked for, and nothing else."""
    return not arguments or any(argument in HELP for argument in arguments)


def parse(
    arguments: Sequence[str],
    *,
    usage: str,
    places: Sequence[str],
    optional: int = 0,
    options: Mapping[str, Collection[str] | None],
) -> tuple[list[str], dict[str, str]]:
    """The values at the places, and those of the options that were given.

    Args:
        usage: the first line of the command's usage, for messages.
        places: what is expected at each.
        optional: how many of the last places may be left out.
        options: name -> the values it may have; None: any.

    Raises:
        UserError: something is missing, too much, or unknown.
    """

    def refuse(what: str) -> NoReturn:
        raise UserError(f"{what}\nusage: {usage}")

    at: list[str] = []
    given: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals and not argument.startswith("-"):
            at.append(argument)
        elif name not in options or not equals:
            refuse(f"{argument}: no such option.{suggestion(name.lstrip('-'), options)}".removesuffix("."))
        else:
            choices = options[name]
            if not value or (choices is not None and value not in choices):
                expected = f"expected {' or '.join(choices)}" if choices is not None else "expected a value"
                refuse(f"{name}: got {value!r}, {expected}.{suggestion(value, choices or ())}".removesuffix("."))
            given[name] = value
    if len(at) > len(places):
        refuse(f"{at[len(places)]}: one argument too many")
    if len(at) < len(places) - optional:
        refuse(f"missing: {', '.join(places[len(at) : len(places) - optional])}")
    return at, given
