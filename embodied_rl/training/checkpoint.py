"""What the actor saves: model and optimiser, sharded, with torch DCP. Where it goes is ``checkpoint_store.py``'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from embodied_rl.errors import CheckpointError
from embodied_rl.models.base import Policy

ACTOR_DIR = "actor"


def save_actor(policy: Policy, optimizer: Optimizer, directory: Path) -> None:
    """Write this rank's shards (a collective)."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(directory / ACTOR_DIR))


def load_actor(policy: Policy, optimizer: Optimizer | None, directory: Path) -> None:
    """Read this rank's shards (a collective); the number of ranks may differ from that of the save.

    Args:
        optimizer: None reads the model alone.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    model_state, optimizer_state = get_state_dict(policy, optimizer or [])
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = optimizer_state
    saved = _read_metadata(directory).state_dict_metadata
    _check_model(saved, model_state, directory)
    try:
        dcp.load(state, checkpoint_id=str(directory / ACTOR_DIR))
    except Exception as error:
        raise CheckpointError(f"{directory}: cannot be loaded into this run's model: {error}") from error
    set_state_dict(
        policy,
        optimizer or [],
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
    )


def _read_metadata(directory: Path) -> Any:
    try:
        return dcp.FileSystemReader(str(directory / ACTOR_DIR)).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{directory}: not a readable checkpoint: {error}") from error


def _check_model(saved: Mapping[str, Any], model_state: Mapping[str, Any], directory: Path) -> None:
    """Refuse a checkpoint of another model, saying how it differs."""
    differences = []
    for name, tensor in model_state.items():
        entry = saved.get(f"model.{name}")
        if entry is None:
            differences.append(f"{name} is missing")
        elif isinstance(tensor, torch.Tensor) and tuple(entry.size) != tuple(tensor.shape):
            differences.append(f"{name} is {list(entry.size)}, expected {list(tensor.shape)}")
    known = {f"model.{name}" for name in model_state}
    differences += [f"{key[6:]} is not in this model" for key in saved if key.startswith("model.") and key not in known]
    if differences:
        shown = "\n".join(f"  {text}" for text in differences[:8])
        more = f"\n  and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise CheckpointError(
            f"{directory} holds another model than this run's:\n{shown}{more}\n"
            "Use the model, env and algorithm that it was saved with (config.yaml in its run directory)."
        )
