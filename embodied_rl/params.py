"""Options as dataclasses: strict types, unknown names refused with the nearest that exists. And values as text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from embodied_rl.errors import ConfigError, listed, suggestion

NOT_OF_WEIGHTS: Final[Mapping[str, bool]] = {"of_weights": False}
"""``metadata`` of a model's option that its weights do not depend on, such as one of sampling: folders of weights are
taken whatever its value."""
OF_GREEDY_ACTIONS: Final[Mapping[str, bool]] = {**NOT_OF_WEIGHTS, "of_greedy_actions": True}
"""``metadata`` of an option that weights do not depend on, but greedy actions do, as far as whether it is the default:
left there, weights that were trained with another value are another policy."""
OF_THE_MACHINE: Final[Mapping[str, bool]] = {"of_the_machine": True}
"""``metadata`` of a simulator's option that changes neither what happens in an episode nor, but for how a renderer
rounds, what a policy sees of it: what it draws with, what it keeps, how large videos are."""

OF_THE_REWARD: Final[Mapping[str, bool]] = {"of_the_reward": True}
"""``metadata`` of a simulator's option that decides what a step earns, or whether it succeeds: what was recorded with
another value of it has rewards of another kind."""


@functools.lru_cache(maxsize=64)
def validator(schema: Any) -> TypeAdapter[Any]:
    """pydantic's validator of a type, made once: it reads the source of every dataclass that it meets."""
    return TypeAdapter(schema)


def jsonable(value: Any) -> Any:
    """A dataclass or other value as JSON types."""
    return validator(Any).dump_python(value, mode="json")


def parse_params(schema: type, params: Mapping[str, Any] | Any, where: str) -> Any:
    """Build an adapter's or model's own ``Params`` dataclass from the free-form section ``where`` of the config.

    One that is built already is returned as it is.
    """
    if isinstance(params, schema):
        return params
    try:
        return validator(schema).validate_json(json.dumps(dict(params)), strict=True, extra="forbid")
    except ValidationError as error:
        names = [field.name for field in dataclasses.fields(schema)]
        raise ConfigError(describe(error, names, params, prefix=where)) from None


def keyword_options(function: Callable[..., Any], given: Collection[str]) -> type | None:
    """A function's ``Params``: a dataclass of its keyword parameters, with their annotations and defaults.

    Args:
        given: parameters that the caller hands over itself.

    Returns:
        None where the function takes any keyword.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    annotations = {p.name: Any if p.annotation is p.empty else p.annotation for p in parameters}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    hints = get_type_hints(SimpleNamespace(__annotations__=annotations), scope, include_extras=True)
    fields = [
        (p.name, hints[p.name])
        if p.default is p.empty
        else (p.name, hints[p.name], dataclasses.field(default_factory=lambda default=p.default: default))
        for p in parameters
    ]
    return dataclasses.make_dataclass(f"{getattr(function, '__name__', 'function')}_params", fields, kw_only=True)


def field_values(params: Any) -> dict[str, Any]:
    """A dataclass's fields by name, nested ones as they are."""
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def describe(error: ValidationError, choices: Iterable[str], given: Any, prefix: str = "") -> list[str]:
    """pydantic's findings as one line for each key.

    Args:
        choices: every dotted key that exists, below ``prefix``.
        given: the content that was validated.
        prefix: section of the config that was validated; empty for the whole.
    """
    known = [f"{prefix}.{name}" if prefix else name for name in choices]
    problems: list[str] = []
    wrong: dict[str, tuple[Any, list[str]]] = {}
    for item in error.errors(include_url=False):
        where = ".".join([prefix, *map(str, item["loc"])] if prefix else map(str, item["loc"]))
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problems.append(unknown_key(where, known))
        elif item["type"] in ("missing", "missing_argument"):
            problems.append(f"{where}: missing; set it with {where}=...")
        else:
            where = ".".join([*([prefix] if prefix else []), *_path_in(given, item["loc"])])
            wrong.setdefault(where, (item["input"], []))[1].append(_lower_first(item["msg"]))
    for where, (got, findings) in wrong.items():
        shown = f"{got!r:.200}"
        problems.append(f"{where}: got {shown} ({type(got).__name__}); {', or '.join(dict.fromkeys(findings))}")
    return problems


def _path_in(given: Any, location: Iterable[int | str]) -> Iterator[str]:
    """pydantic's location of a finding, without its own names for the members of a union."""
    for part in location:
        members: Mapping[Any, Any] = (
            given if isinstance(given, Mapping) else dict(enumerate(given if isinstance(given, list) else []))
        )
        if part in members:
            given = members[part]
            yield str(part)


def unknown_key(key: str, choices: Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest that does: a right name in a wrong section first. A
    name unlike all others of its section gets their list."""
    section, _, last = key.rpartition(".")
    known = [name for name in choices if not key.startswith(f"{name}.")]
    same_name = [name for name in known if name.rsplit(".", 1)[-1] == last]
    beside = [name.removeprefix(f"{section}.") for name in known if section and name.startswith(f"{section}.")]
    near = (
        suggestion(key, same_name, cutoff=0.0)
        or suggestion(last, beside, cutoff=0.6, prefix=f"{section}.")
        or (f" {section} has {listed(beside, most=12)}." if beside else suggestion(key, known))
    )
    return f"{key or '(empty)'}: no such key.{near}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def argument(key: str, value: object) -> str:
    """``key=value`` as Hydra reads it on the command line, in quotes where it needs them; the shell's are not there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    with contextlib.suppress(HydraException):
        if isinstance(value, str) and OverridesParser.create().parse_override(f"{key}={value}").value() == value:
            return f"{key}={value}"
    return f"{key}={_literal(value)}"


def _literal(value: object) -> str:
    """A value in Hydra's grammar, whose keys take backslashes instead of quotes."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, Mapping):
        escaped = {re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", name): _literal(below) for name, below in value.items()}
        return "{" + ", ".join(f"{name}: {text}" for name, text in escaped.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return QuotedString(value, Quote.double).with_quotes() if isinstance(value, str) else json.dumps(value)


def at(content: Any, key: str) -> Any:
    """The value of a dotted key of nested mappings; None where there is none."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key of nested mappings, with its value; empty mappings are left out."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        yield from flat(item, f"{prefix}.{name}" if prefix else str(name))


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shown(below)}" for name, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
