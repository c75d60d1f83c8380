"""Options as dataclasses: strict types, unknown names refused with the nearest that exists."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from embodied_rl.errors import ConfigError, suggestion


def parse_params(schema: type, params: Mapping[str, Any], where: str) -> Any:
    """Build an adapter's or model's own ``Params`` dataclass from the free-form section ``where`` of the config."""
    try:
        return TypeAdapter(schema).validate_json(json.dumps(dict(params)), strict=True, extra="forbid")
    except ValidationError as error:
        names = [field.name for field in dataclasses.fields(schema)]
        raise ConfigError(describe(error, names, prefix=where)) from None


def describe(error: ValidationError, choices: Iterable[str], prefix: str = "") -> list[str]:
    """pydantic's findings as one line each.

    Args:
        choices: every dotted key that exists, below ``prefix``.
        prefix: section of the config that was validated; empty for the whole.
    """
    problems = []
    for item in error.errors(include_url=False):
        where = ".".join([prefix, *map(str, item["loc"])] if prefix else map(str, item["loc"]))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problems.append(unknown_key(where, [f"{prefix}.{name}" if prefix else name for name in choices]))
        elif item["type"] in ("missing", "missing_argument"):
            problems.append(f"{where}: missing; set it with {where}=...")
        else:
            got = item["input"]
            problems.append(f"{where}: got {got!r} ({type(got).__name__}); {_lower_first(item['msg'])}")
    return problems


def unknown_key(key: str, choices: Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest that does: a right name in a wrong section first."""
    known = list(choices)
    last = key.rsplit(".", 1)[-1]
    same_name = [name for name in known if name.rsplit(".", 1)[-1] == last]
    return f"{key}: no such key.{suggestion(key, same_name, cutoff=0.0) or suggestion(key, known)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
