"""What a folder of weights or a checkpoint says of its policy, by its small files alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from embodied_rl.errors import CheckpointError, UserError, listed
from embodied_rl.files import parse_json
from embodied_rl.models.registry import MODELS

if TYPE_CHECKING:
    from embodied_rl.schema import ModelConfig

CONFIG_FILE: Final = "config.json"
RECORD_FILE: Final = "policy.json"
Spaces = Mapping[str, Any]
"""The fields of a ``PolicySpec``; None, or none: not known."""
_KINDS: Final[Mapping[str, str]] = {
    "mlp": "MlpPolicy",
    "openvla": "openvla",
    "openvla_oft": "openvla",
    "pi0": "pi0",
    "pi05": "pi05",
    "smolvla": "smolvla",
    "tiny_vla": "TinyVlaPolicy",
}
"""Model -> what the ``config.json`` of its folders calls it, under one of :data:`_NAMED`."""
_NAMED: Final = ("policy", "type", "model_type")
_NUMBERS: Final = {
    "num_action_chunks": "model.num_action_chunks",
    "state_dim": "numbers of the env's state",
    "action_dim": "numbers of the env's actions",
    "action_choices": "choices of the env's actions",
}
_SPACES: Final[Mapping[str, Mapping[str, str]]] = {
    "mlp": _NUMBERS,
    "tiny_vla": {**_NUMBERS, "image_shapes": "images of the env (env.init_params)"},
}
"""Model -> fields of the spec that decide its tensors' shapes. Others have folders that serve more than one env."""


def read_json(path: Path, *, key: str = "model.path") -> dict[str, Any]:
    """A JSON object; ``key`` is the config's that named its folder.

    Raises:
        UserError: it is missing or no JSON object.
    """
    try:
        content = parse_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{key}: {path} does not exist; {contents(path.parent)}") from None
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}); give a folder of weights") from None
    except ValueError as error:
        raise UserError(f"{key}: {path} is no JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} holds a {type(content).__name__}, expected an object")
    return content


def contents(directory: Path) -> str:
    """What is in a folder that lacks something, for the message."""
    if not directory.is_dir():
        return "give a folder of weights"
    names = sorted(entry.name for entry in directory.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"the folder holds {shown}" if names else "the folder is empty"


def check_folder(config: ModelConfig, here: Spaces) -> None:
    """See that ``model.path`` holds weights of ``model.model_type``, made for the run's env and chunks.

    Raises:
        UserError: it does not.
    """
    wanted = _KINDS.get(config.model_type)
    if config.path is None or wanted is None:
        return
    content = read_json(Path(config.path) / CONFIG_FILE)
    said = [str(content[name]) for name in _NAMED if name in content]
    if wanted not in said:
        models = [model for model, kind in _KINDS.items() if kind in said]
        advice = f"use model={' or model='.join(models)}" if models else "no model here reads it (docs/models.md)"
        raise UserError(
            f"model.path={config.path}: its {CONFIG_FILE} says {listed(said) or 'nothing of its model'}, expected "
            f"{wanted!r} for model_type={config.model_type}; {advice}"
        )
    if others := _others(config, content, here):
        raise UserError(f"model.path={config.path}: {others}")


def check_checkpoint(config: ModelConfig, checkpoint: Path, key: str, here: Spaces) -> None:
    """The same of a checkpoint. One that says nothing passes.

    Raises:
        CheckpointError: it is of another model, or made for another env or other chunks.
    """
    try:
        content = read_json(checkpoint / RECORD_FILE)
    except (OSError, UserError):  # of an earlier version, or damaged, of which the checksums say more
        return
    found = content.get("model", {}).get("model_type")
    if found not in (None, config.model_type):
        name = f"model={found}" if found in MODELS else f"model.model_type={found}"
        raise CheckpointError(
            f"{key}: {checkpoint} is of a policy of model_type={found}, and this run's is {config.model_type}; use "
            f"{name}"
        )
    if others := _others(config, content, here):
        raise CheckpointError(f"{key}: {checkpoint}: {others}")


def _others(config: ModelConfig, content: Mapping[str, Any], here: Spaces) -> str:
    """What the weights cannot serve; empty where nothing is known of it."""
    there, parts = content.get("spec") or {}, []
    for name in _SPACES.get(config.model_type, ()):
        before, now = (_shown(spaces.get(name)) for spaces in (there, here))
        if before is not None and now is not None and before != now:
            parts.append(f"{_SPACES[config.model_type][name]} {before} there, {now} here")
    return f"weights for {'; '.join(parts)}. Set them as they were, or use other weights" if parts else ""


def _shown(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) or "none"
    if not isinstance(value, Mapping):
        return None if value is None else str(value)
    return ", ".join(f"{camera} {' x '.join(map(str, size))}" for camera, size in sorted(value.items())) or "none"
