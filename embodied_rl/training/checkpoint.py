"""Checkpoints: sharded with torch DCP, published atomically, found again.

A run's checkpoints are ``<run>/checkpoints/global_step_<N>/``, each with ``actor/`` (DCP: model and optimiser) and
``state.json``. Everything is written to a hidden neighbour and renamed when complete, so a directory that has the right
name is a whole checkpoint, whenever the run was killed. Randomness is a function of seed and step everywhere, so the step
is all that has to be remembered of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from embodied_rl.errors import CheckpointError
from embodied_rl.models.base import Policy

STATE_FILE = "state.json"
ACTOR_DIR = "actor"
_NAME = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run needs, beside weights and optimiser, to go on."""

    step: int
    """Finished training steps; the next one has this number."""
    policy_version: int


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step}"


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


def begin(directory: Path) -> Path:
    """A clean hidden place to write the checkpoint to that :func:`publish` will call ``directory``."""
    scratch = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def publish(scratch: Path, directory: Path, state: RunState, *, max_keep: int | None) -> None:
    """Complete a checkpoint: its state, then its name; then drop the oldest ones beyond ``max_keep``."""
    (scratch / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    scratch.rename(directory)
    if max_keep is not None:
        for old in complete_checkpoints(directory.parent)[:-max_keep]:
            shutil.rmtree(old)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints in a run's ``checkpoints`` directory, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def resolve(resume_dir: str, experiment_dir: Path) -> Path | None:
    """The checkpoint that ``runner.resume_dir`` means.

    Args:
        resume_dir: ``auto``, a run directory, or a checkpoint.
        experiment_dir: where ``auto`` looks: the newest checkpoint of the newest run that has one.

    Returns:
        None only for ``auto`` where no run has a checkpoint.

    Raises:
        CheckpointError: the path does not exist or holds no whole checkpoint.
    """
    if resume_dir == "auto":
        for run in sorted(experiment_dir.glob("*"), reverse=True):
            if found := complete_checkpoints(run / "checkpoints"):
                return found[-1]
        return None
    path = Path(resume_dir)
    if not path.is_dir():
        raise CheckpointError(f"runner.resume_dir={resume_dir}: no such directory")
    if (path / STATE_FILE).is_file():
        return path
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    if not found:
        raise CheckpointError(
            f"runner.resume_dir={resume_dir}: holds no whole checkpoint (checkpoints/global_step_<N>/{STATE_FILE})"
        )
    return found[-1]


def read_state(directory: Path) -> RunState:
    """A checkpoint's :class:`RunState`."""
    try:
        return RunState(**json.loads((directory / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / STATE_FILE}: cannot be read: {error}") from error
