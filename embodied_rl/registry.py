"""Names for classes: a table maps a name to ``module:Class``, imported when it is chosen. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from embodied_rl.errors import UserError, suggestion


def load_class(key: str, table: Mapping[str, str], name: str) -> type:
    """The class that ``name`` stands for.

    Args:
        key: the config key that gave the name, for messages.
        table: name -> "module:Class".
        name: one of the table's, or "module:Class" for a class of one's own.

    Raises:
        UserError: no such name, module or class.
    """
    module_name, colon, class_name = table.get(name, name).partition(":")
    if not colon:
        raise UserError(
            f"{key}: got {name!r}, expected one of {', '.join(sorted(table))}, or module:Class."
            f"{suggestion(name, table)}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key}: got {name!r}, but module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [attribute for attribute, value in vars(module).items() if isinstance(value, type)]
        raise UserError(
            f"{key}: got {name!r}, but module {module_name!r} has no class {class_name!r}."
            f"{suggestion(class_name, classes)}"
        )
    return found
