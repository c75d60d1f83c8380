"""Model names. A new model adds one line to :data:`MODELS`. Importing this needs no torch."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from embodied_rl.models.base import Policy, PolicySpec

MODELS: dict[str, str] = {
    "mlp": "embodied_rl.models.mlp:MlpPolicy",
    "tiny_vla": "embodied_rl.models.tiny_vla:TinyVlaPolicy",
}
"""``model_type`` -> "module:Class". Imported on first use, so that a name costs nothing until it is chosen."""


def policy_class(model_type: str) -> type[Policy]:
    """The policy that ``model_type`` names: a key of :data:`MODELS`, or "some.module:Class" for one of your own.

    Raises:
        ValueError: no such name, or the module has no such class.
        ImportError: the module cannot be imported.
    """
    module_name, colon, class_name = MODELS.get(model_type, model_type).partition(":")
    if not colon:
        raise ValueError(
            f"unknown model_type {model_type!r}.{_suggestion(model_type, MODELS)} Known: {', '.join(sorted(MODELS))}; "
            'or name a policy class of your own as "some.module:Class".'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"model_type {model_type!r}: cannot import module {module_name!r}: {error}") from error
    policy = getattr(module, class_name, None)
    if not isinstance(policy, type):
        classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
        raise ValueError(
            f"model_type {model_type!r}: module {module_name!r} has no class {class_name!r}."
            f"{_suggestion(class_name, classes)}"
        )
    return policy


def build_policy(model_type: str, spec: PolicySpec, params: Mapping[str, Any]) -> Policy:
    """Construct a policy with fresh weights; ``params`` is the config's ``model.params``.

    Raises:
        ValueError: an unknown model or parameter, a parameter of the wrong type or out of range, or a spec that the
            model cannot serve.
        ImportError: the model's module cannot be imported.
    """
    model = policy_class(model_type)
    return model(spec, build_params(model.Params, params, owner=f"model_type {model_type!r}"))


def build_params(params_class: type, params: Mapping[str, Any], *, owner: str) -> Any:
    """``params`` as the dataclass ``params_class``; nothing is converted but int to float. ``owner`` opens the message.

    Raises:
        ValueError: lists every unknown name (with the nearest known one), wrong type and value out of range.
    """
    known = {field.name: field for field in dataclasses.fields(params_class)}
    problems = [
        f"unknown parameter {name!r}.{_suggestion(name, known)} Known: {', '.join(known)}"
        for name in params
        if name not in known
    ]
    try:
        # As JSON: pydantic's strict mode makes a dataclass of a JSON object, but not of a dict.
        document = json.dumps({name: value for name, value in params.items() if name in known})
        built = TypeAdapter(params_class).validate_json(document, strict=True)
    except ValidationError as error:
        for detail in error.errors():
            where = ".".join(str(part) for part in detail["loc"])
            problems.append(f"{where}: got {detail['input']!r}; {detail['msg'].lower()}")
        built = None
    if problems:
        raise ValueError(f"{owner}: " + "; ".join(problems))
    return built


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
