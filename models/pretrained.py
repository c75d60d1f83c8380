"""Folders of weights in the project's own layout, for models that have no published one.

``config.json`` says which policy the weights are of, and with which parameters and spaces; ``model.safetensors`` holds
them. Also what other layouts share: reading all weights of a folder, whole or in shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodied_rl.errors import UserError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD_FILE = "value_head.safetensors"
"""Beside published layouts, which have no value head."""


def write(policy: nn.Module, params: Any, spec: Any, directory: Path) -> None:
    """Write ``policy``, built from the dataclasses ``params`` and ``spec``, into ``directory``, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"policy": type(policy).__name__, "params": asdict(params), "spec": asdict(spec)}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(directory / WEIGHTS_FILE, policy.state_dict())


def read(policy: nn.Module, params: Any, directory: Path) -> None:
    """Give ``policy`` the weights that :func:`write` wrote.

    Raises:
        UserError: not such a folder, or one of another policy.
    """
    config = read_json(directory / CONFIG_FILE)
    ours = {"policy": type(policy).__name__, "params": json.loads(json.dumps(asdict(params)))}
    for key, value in ours.items():
        if config.get(key) != value:
            raise UserError(
                f"model.path={directory}: its {CONFIG_FILE} says {key} {config.get(key)}, and this run has {value}; "
                "choose the model and model.params that the weights were made with"
            )
    load_strictly(policy, read_weights(directory), directory)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file; tensors that share memory are written each."""
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of ``model.safetensors``, or of the shards that its index names.

    Raises:
        UserError: neither is there, or a file is damaged.
    """
    index = directory / INDEX_FILE
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [WEIGHTS_FILE]
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_tensors(directory / name)
    return tensors


def read_tensors(path: Path, *, key: str = "model.path") -> dict[str, Tensor]:
    """One safetensors file; ``key`` is the config's that named its folder.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{key}: {path} does not exist; {_contents(path.parent)}") from None
    except SafetensorError as error:
        raise UserError(f"{key}: {path} is damaged ({error}); copy it again") from error


def read_json(path: Path, *, key: str = "model.path") -> dict[str, Any]:
    """A JSON object; ``key`` is the config's that named its folder.

    Raises:
        UserError: it is missing or no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{key}: {path} does not exist; {_contents(path.parent)}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: {path} is no JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} holds a {type(content).__name__}, expected an object")
    return content


def load_strictly(policy: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Load a whole state dict. A value head may be missing (it then is fresh), or too many.

    Raises:
        UserError: other weights are missing or too many, or have another shape.
    """
    own = policy.state_dict()
    ours = {name for name in own if not name.startswith("value_head.")}
    theirs = {name for name in weights if not name.startswith("value_head.")}
    problems = [f"{name} is missing" for name in sorted(ours - theirs)]
    problems += [f"{name} is unexpected" for name in sorted(theirs - ours)]
    problems += [
        f"{name} is {list(weights[name].shape)}, expected {list(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if own[name].shape != weights[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"model.path={directory}: the weights do not fit the model: {'; '.join(problems[:3])}{more}")
    policy.load_state_dict({name: tensor for name, tensor in weights.items() if name in own}, strict=False)


def _contents(directory: Path) -> str:
    if not directory.is_dir():
        return "give a folder of weights"
    names = sorted(entry.name for entry in directory.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"the folder holds {shown}" if names else "the folder is empty"
