"""What the actor saves: model and optimiser, sharded, with torch DCP. Where it goes is ``checkpoint_store.py``'s.

Only tensors are saved: learning rates and other hyperparameters are those of the run that goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from embodied_rl.checkpoints.shard_files import ShardWriter, read_index
from embodied_rl.checkpoints.store import refuse_strangers
from embodied_rl.errors import CheckpointError, first_line
from embodied_rl.models.base import Policy

ACTOR_DIR = "actor"
_SHOWN = 8
"""Differing tensors that a message lists."""


def actor_state(
    policy: Policy, optimizer: Optimizer | None, extra: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """What a checkpoint holds: this rank's shards (a collective).

    Args:
        optimizer: None leaves it out.
        extra: small tensors, equal on all ranks, that go with them.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(policy), "extra": dict(extra or {})}
    if optimizer is not None:
        state["optimizer"] = {"state": _optimizer_state(policy, optimizer)["state"]}
    return state


def save_actor(
    policy: Policy, optimizer: Optimizer | None, directory: Path, extra: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write this rank's shards (a collective); the arguments are those of :func:`actor_state`."""
    save(actor_state(policy, optimizer, extra), storage_writer=ShardWriter(directory / ACTOR_DIR))


def write_error(error: BaseException, directory: Path) -> CheckpointError:
    """The error to raise where a checkpoint cannot be written."""
    return CheckpointError(f"{directory}: cannot be written: {_cause(error)}. Is the disk full, or read-only?")


def has_adapters(directory: Path) -> bool:
    """Whether the checkpoint is of a policy with adapters (LoRA)."""
    return any(".lora_" in name for name in _saved_tensors(directory))


def load_weights(policy: Policy, directory: Path) -> None:
    """Read the weights alone into a whole policy that is not sharded. Every rank does so for itself.

    A value head that the checkpoint lacks as a whole stays as it is; one that the policy has no use for is left out.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    of_value_head = {id(p) for p in policy.value_parameters()}
    heads = {name for name, p in policy.named_parameters() if id(p) in of_value_head}
    saved = {
        name: entry
        for name, entry in _saved_tensors(directory).items()
        if heads or not name.startswith("model.value_head.")
    }
    has_head = any(name.startswith("model.value_head.") for name in saved)
    state = {name: t for name, t in policy.state_dict().items() if name not in heads or has_head}
    _check_model(saved, state, directory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant
            load({"model": state}, storage_reader=_reader(directory), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{directory}: cannot be read, or not whole: {_cause(error)}. Use another checkpoint."
        ) from error
    policy.load_state_dict(state, strict=False)


def load_actor(
    policy: Policy, optimizer: Optimizer | None, directory: Path, extra: dict[str, torch.Tensor] | None = None
) -> None:
    """Read this rank's shards (a collective); the number of ranks may differ from that of the save.

    Moments and step counts are the checkpoint's; learning rates and all other hyperparameters stay those of this run's
    configuration.

    Args:
        optimizer: None reads the model alone.
        extra: filled in from the checkpoint; what the checkpoint does not have (its run had no use for it) is removed.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    model_state = get_model_state_dict(policy)
    saved = _saved_tensors(directory)
    _check_model(saved, model_state, directory)
    state: dict[str, Any] = {"model": model_state}
    if extra:
        for name in [name for name in extra if f"extra.{name}" not in saved]:
            del extra[name]
        state["extra"] = extra
    optimizer_state: dict[str, Any] = {}
    if optimizer is not None:
        if not any(name.startswith("optimizer.") for name in saved):
            raise CheckpointError(
                f"{directory}: holds no optimiser, so no run can go on from it (it was saved with "
                "runner.save_contents=[model]); start from its weights with runner.init_from, or use another checkpoint"
            )
        optimizer_state = _optimizer_state(policy, optimizer)
        _check_optimizer(saved, optimizer_state["state"], directory)
        state["optimizer"] = {"state": optimizer_state["state"]}
    try:
        load(state, storage_reader=_reader(directory))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(
            f"{directory}: cannot be read, or not whole: {_cause(error)}. Use another checkpoint of the run."
        ) from error
    set_model_state_dict(policy, state["model"])
    if optimizer is not None:
        configured = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        set_optimizer_state_dict(policy, optimizer, optimizer_state)
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            group.update(options)


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter that has none yet, and leave that of the others as it is.

    A parameter that never had a gradient has none, and a checkpoint holds the state of all: saving depends neither on
    what was trained so far nor on whether a step was made. The optimiser makes it by a step with gradients and learning
    rates of zero for those parameters alone; its count is undone.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not missing:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad(set_to_none=True)
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter in missing:
        optimizer.state[parameter]["step"].zero_()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _optimizer_state(policy: Policy, optimizer: Optimizer) -> dict[str, Any]:
    init_optimizer_state(optimizer)
    return get_optimizer_state_dict(policy, optimizer)


def _reader(directory: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(directory / ACTOR_DIR))


def _saved_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    refuse_strangers(directory)
    return read_index(directory / ACTOR_DIR)


def _check_model(saved: Mapping[str, TensorStorageMetadata], model_state: Mapping[str, Any], directory: Path) -> None:
    """Refuse a checkpoint of another model, saying how it differs."""
    held = {name.removeprefix("model."): list(entry.size) for name, entry in saved.items() if name.startswith("model.")}
    if not held:
        raise CheckpointError(f"{directory}: holds no weights; use another checkpoint")
    wanted = {name: list(tensor.shape) for name, tensor in model_state.items() if isinstance(tensor, torch.Tensor)}
    differences = [f"{name} is missing" for name in wanted.keys() - held.keys()]
    differences += [f"{name} is not in this model" for name in held.keys() - wanted.keys()]
    differences += [
        f"{name} is {held[name]}, expected {wanted[name]}"
        for name in wanted.keys() & held.keys()
        if held[name] != wanted[name]
    ]
    if differences:
        shown = "\n".join(f"  {text}" for text in sorted(differences)[:_SHOWN])
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"{directory} holds another model than this run's:\n{shown}{more}\n"
            "Use the model, env and algorithm that it was saved with (config.yaml in its run directory)."
        )


def _check_optimizer(
    saved: Mapping[str, TensorStorageMetadata], state: Mapping[str, Mapping[str, Any]], directory: Path
) -> None:
    """Refuse a checkpoint that lacks moments, which is no damage: it was saved without them."""
    wanted = {f"optimizer.state.{parameter}.{name}" for parameter, entries in state.items() for name in entries}
    if missing := sorted(wanted - saved.keys()):
        shown = "\n".join(f"  {name}" for name in missing[:_SHOWN])
        more = f"\n  and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"{directory} can be read, and lacks {len(missing)} of the {len(wanted)} tensors of this run's optimiser:\n"
            f"{shown}{more}\n"
            "They were not saved. Go on with the version and configuration that saved it (config.yaml in its run "
            "directory), or start a new run from its weights with runner.init_from."
        )


def _cause(error: BaseException) -> str:
    """What went wrong, in one line: DCP's own message has the tracebacks of all ranks."""
    if isinstance(error, CheckpointException):
        [error, *_] = [failure for failure, _ in error.failures.values()]
    return first_line(error)
