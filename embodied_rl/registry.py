"""Names for classes and functions: a table maps a name to ``module:Class``, imported when it is chosen. No torch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from embodied_rl.errors import UserError, suggestion

_PLACEHOLDER: Final = {"class": "Class", "function": "function"}


def load_class(key: str, table: Mapping[str, str], name: str) -> type:
    """The class that ``name`` stands for.

    Args:
        key: the config key that gave the name, for messages.
        table: name -> "module:Class".
        name: one of the table's, or "module:Class" for a class of one's own.

    Raises:
        UserError: no such name, module or class.
    """
    return _load(key, table, name, "class", lambda found: isinstance(found, type))


def load_configurable(key: str, table: Mapping[str, str], name: str) -> type:
    """As :func:`load_class`, for a class whose options are its dataclass ``Params``."""
    found = load_class(key, table, name)
    if not dataclasses.is_dataclass(getattr(found, "Params", None)):
        raise UserError(
            f"{key}: got {name!r}, but the class {found.__name__} has no dataclass Params, which says what options it "
            "has; one without any will do"
        )
    return found


def load_function(key: str, table: Mapping[str, str], name: str) -> Callable[..., Any]:
    """As :func:`load_class`, for a function."""
    return _load(key, table, name, "function", lambda found: callable(found) and not isinstance(found, type))


def _load(key: str, table: Mapping[str, str], name: str, what: str, fits: Callable[[Any], bool]) -> Any:
    module_name, colon, attribute = table.get(name, name).partition(":")
    if not colon:
        raise UserError(
            f"{key}: got {name!r}, expected one of {', '.join(sorted(table))}, or module:{_PLACEHOLDER[what]}."
            f"{suggestion(name, table)}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key}: got {name!r}, but module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not fits(found):
        known = [own for own, value in vars(module).items() if fits(value)]
        raise UserError(
            f"{key}: got {name!r}, but module {module_name!r} has no {what} {attribute!r}."
            f"{suggestion(attribute, known)}"
        )
    return found
