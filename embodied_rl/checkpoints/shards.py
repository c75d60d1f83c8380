"""The shards that the actor saves: model and optimiser, with torch DCP. Where it goes is ``store.py``'s.

Only tensors are saved: learning rates and other hyperparameters are those of the run that goes on.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, futures, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from embodied_rl.checkpoints.store import refuse_strangers
from embodied_rl.errors import CheckpointError, first_line, listed
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.folder import misfits
from embodied_rl.training.optimizer import init_optimizer_state

ACTOR_DIR = "actor"
_OF_CRITIC: Final = "critic."
"""What the names of a critic's tensors begin with; the rest is as the policy's."""
_OF_SOFT_CRITICS: Final = f"{_OF_CRITIC}model.online."
_SHOWN = 8
"""Differing tensors that a message lists."""


Trained: TypeAlias = tuple[nn.Module, Optimizer | None]
"""A sharded network and its optimiser; None leaves that out."""


def actor_state(
    policy: Policy,
    optimizer: Optimizer | None,
    extra: Mapping[str, torch.Tensor] | None = None,
    *,
    critic: Trained | None = None,
) -> dict[str, Any]:
    """Collect a checkpoint's contents: this rank's shards (a collective).

    Args:
        optimizer: None leaves it out.
        extra: small tensors, equal on all ranks, that go with them.
        critic: a critic of its own.
    """
    state = _trained_state(policy, optimizer) | {"extra": dict(extra or {})}
    if critic is not None:
        state["critic"] = _trained_state(*critic)
    return state


def _trained_state(policy: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(policy)}
    if optimizer is not None:
        state["optimizer"] = {"state": _optimizer_state(policy, optimizer)["state"]}
    return state


def save_actor(
    policy: Policy,
    optimizer: Optimizer | None,
    directory: Path,
    extra: Mapping[str, torch.Tensor] | None = None,
    *,
    critic: Trained | None = None,
) -> None:
    """Write this rank's shards (a collective); the arguments are those of :func:`actor_state`."""
    save(actor_state(policy, optimizer, extra, critic=critic), storage_writer=ShardWriter(directory / ACTOR_DIR))


def write_error(error: BaseException, directory: Path) -> CheckpointError:
    """The error to raise where a checkpoint cannot be written."""
    return CheckpointError(f"{directory}: cannot be written: {_cause(error)}. Is the disk full, or read-only?")


def has_adapters(directory: Path) -> bool:
    """Whether the checkpoint is of a policy with adapters (LoRA)."""
    return any(".lora_" in name for name in _saved_tensors(directory))


def has_critic(directory: Path) -> bool:
    """Whether the checkpoint holds a critic of its own: a policy's, with a value head."""
    names = _critic_tensors(directory)
    return bool(names) and not any(name.startswith(_OF_SOFT_CRITICS) for name in names)


def has_soft_critics(directory: Path) -> bool:
    """Whether it holds critics of actions (:class:`~embodied_rl.training.soft_critics.SoftCritics`)."""
    return any(name.startswith(_OF_SOFT_CRITICS) for name in _critic_tensors(directory))


def _critic_tensors(directory: Path) -> list[str]:
    return [name for name in _saved_tensors(directory) if name.startswith(_OF_CRITIC)]


def check_weights(policy: Policy, directory: Path, *, exactly: bool = False) -> None:
    """See by the shards' headers that :func:`load_weights` will work, or :func:`load_actor`, which is exact.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    if exactly:
        _check_model(_saved_tensors(directory), policy.state_dict(), directory)
    else:
        _matching_state(policy, directory)


def load_weights(policy: Policy, directory: Path) -> None:
    """Read the weights alone into a whole policy that is not sharded. Every rank does so for itself.

    A value head that the checkpoint lacks as a whole stays as it is; one that the policy has no use for is left out.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    state = _matching_state(policy, directory)
    _load_whole({"model": state}, directory)
    policy.load_state_dict(state, strict=False)


def load_critic_weights(critic: nn.Module, directory: Path) -> None:
    """The same of a checkpoint's critic, which has a value head.

    Raises:
        CheckpointError: unreadable, or of another critic.
    """
    state = critic.state_dict()
    _check_model(_part(_saved_tensors(directory), _OF_CRITIC), state, directory, "critic")
    _load_whole({"critic": {"model": state}}, directory)
    critic.load_state_dict(state)


def _load_whole(state: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant
        _load(state, directory, no_dist=True)


def _matching_state(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """The part of the policy's state that the checkpoint has; raises CheckpointError where the rest does not fit."""
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
    return state


def load_actor(
    policy: Policy,
    optimizer: Optimizer | None,
    directory: Path,
    extra: dict[str, torch.Tensor] | None = None,
    *,
    critic: Trained | None = None,
) -> None:
    """Read this rank's shards (a collective); the number of ranks may differ from that of the save.

    Moments and step counts are the checkpoint's; learning rates and all other hyperparameters stay those of this run's
    configuration.

    Args:
        optimizer: None reads the model alone.
        extra: filled in from the checkpoint; what the checkpoint does not have (its run had no use for it) is removed.
        critic: a critic of its own; None leaves one that the checkpoint may have where it is.

    Raises:
        CheckpointError: unreadable, or of another model.
    """
    saved = _saved_tensors(directory)
    state = _state_to_fill(policy, optimizer, saved, directory)
    if critic is not None:
        state["critic"] = _state_to_fill(*critic, _part(saved, _OF_CRITIC), directory, "critic")
    if extra:
        for name in [name for name in extra if f"extra.{name}" not in saved]:
            del extra[name]
        state["extra"] = extra
    _load(state, directory)
    _fill(policy, optimizer, state)
    if critic is not None:
        _fill(*critic, state["critic"])


def _part(saved: Mapping[str, TensorStorageMetadata], prefix: str) -> dict[str, TensorStorageMetadata]:
    return {name.removeprefix(prefix): entry for name, entry in saved.items() if name.startswith(prefix)}


def _state_to_fill(
    policy: nn.Module,
    optimizer: Optimizer | None,
    saved: Mapping[str, TensorStorageMetadata],
    directory: Path,
    what: str = "model",
) -> dict[str, Any]:
    """What the shards are read into, as in :func:`actor_state`; they hold ``saved``, which has to fit."""
    state: dict[str, Any] = {"model": get_model_state_dict(policy)}
    _check_model(saved, state["model"], directory, what)
    if optimizer is not None:
        if not any(name.startswith("optimizer.") for name in saved):
            raise CheckpointError(
                f"{directory}: holds no optimiser, so no run can resume it (it was saved with "
                "runner.save_contents=[model]); start from its weights with runner.init_from, or use another checkpoint"
            )
        state["optimizer"] = {"state": _optimizer_state(policy, optimizer)["state"]}
        _check_optimizer(saved, state["optimizer"]["state"], directory)
    return state


def _fill(policy: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
    """Give a network and its optimiser what was read; the optimiser's hyperparameters stay."""
    set_model_state_dict(policy, state["model"])
    if optimizer is not None:
        configured = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        whole = get_optimizer_state_dict(policy, optimizer) | {"state": state["optimizer"]["state"]}
        set_optimizer_state_dict(policy, optimizer, whole)
        for group, options in zip(optimizer.param_groups, configured, strict=True):
            group.update(options)


def _optimizer_state(policy: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    init_optimizer_state(optimizer)
    return get_optimizer_state_dict(policy, optimizer)


def _load(state: dict[str, Any], directory: Path, *, no_dist: bool = False) -> None:
    """Fill ``state`` from the shards."""
    try:
        load(state, storage_reader=HuggingFaceStorageReader(str(directory / ACTOR_DIR)), no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(
            f"{directory}: cannot be read, or not whole: {_cause(error)}. Use another checkpoint of the run."
        ) from error


def _saved_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    refuse_strangers(directory)
    return read_index(directory / ACTOR_DIR)


def _check_model(
    saved: Mapping[str, TensorStorageMetadata], model_state: Mapping[str, Any], directory: Path, what: str = "model"
) -> None:
    """Refuse a checkpoint of another model, saying how it differs."""
    held = {name.removeprefix("model."): entry.size for name, entry in saved.items() if name.startswith("model.")}
    if not held:
        of = "" if what == "model" else f" of a {what}"
        raise CheckpointError(f"{directory}: holds no weights{of}; use another checkpoint")
    wanted = {name: tensor.shape for name, tensor in model_state.items() if isinstance(tensor, Tensor)}
    if differences := misfits(wanted, held):
        raise CheckpointError(
            f"{directory} holds another {what} than this run's:{_lines(differences)}\n"
            "Use the model, env and algorithm that it was saved with (config.yaml in its run directory)."
        )


def _check_optimizer(
    saved: Mapping[str, TensorStorageMetadata], state: Mapping[str, Mapping[str, Any]], directory: Path
) -> None:
    """Refuse a checkpoint that lacks moments, which is no damage: it was saved without them."""
    wanted = {f"optimizer.state.{parameter}.{name}" for parameter, entries in state.items() for name in entries}
    if missing := sorted(wanted - saved.keys()):
        raise CheckpointError(
            f"{directory} can be read, and lacks {len(missing)} of the {len(wanted)} tensors of this run's optimiser:"
            f"{_lines(missing)}\n"
            "They were not saved. Go on with the version and configuration that saved it (config.yaml in its run "
            "directory), or start a new run from its weights with runner.init_from."
        )


def _lines(items: Iterable[str]) -> str:
    return "\n  " + listed(sorted(items), _SHOWN, "\n  ")


def _cause(error: BaseException) -> str:
    """The cause in one line: DCP's own message has the tracebacks of all ranks."""
    if isinstance(error, CheckpointException):
        [error, *_] = [failure for failure, _ in error.failures.values()]
    return first_line(error)


SUFFIX: Final = ".safetensors"
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in the format: https://github.com/huggingface/safetensors#format."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes one file a rank that holds something, one tensor after another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """Called by torch, in every rank.

        Raises:
            TypeError: something is no tensor, or one of a type that the format does not have.
        """
        done: futures.Future[list[WriteResult]] = futures.Future()
        if plan.items:
            number = plan.storage_data["shard_index"]
            with (Path(self.path) / f"shard_{number:05d}{SUFFIX}").open("wb") as file:
                _write(file, plan.items, planner)
                file.flush()
                os.fsync(file.fileno())
        done.set_result([WriteResult(i.index, i.tensor_storage_size() or 0, storage_data=None) for i in plan.items])
        return done


def _write(file: BinaryIO, items: list[WriteItem], planner: SavePlanner) -> None:
    header: dict[str, object] = {}
    chunks: dict[str, dict[str, list[int]]] = {}
    # The widest first, so that every one of them begins at a multiple of its width.
    ordered = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    end = 0
    for item in ordered:
        name, shape = item.index.fqn, _shape(item)
        if name in header:
            raise TypeError(f"{name}: a rank holds several parts of it; expected one")
        begin, end = end, end + math.prod(shape) * _dtype(item).itemsize
        header[name] = {"dtype": _DTYPES[_dtype(item)], "shape": shape, "data_offsets": [begin, end]}
        chunks[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}  # type: ignore[union-attr]
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(chunks)}  # its offset in the whole
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for item in ordered:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _dtype(item: WriteItem) -> torch.dtype:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    dtype = item.tensor_data.properties.dtype
    if dtype not in _DTYPES:
        raise TypeError(f"{item.index.fqn}: {dtype} cannot be saved, but {', '.join(map(str, _DTYPES))}")
    return dtype


def _shape(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.sizes)


def read_index(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Read what the shards in a folder hold: name -> shape, type and parts.

    Raises:
        CheckpointError: there are none, one of them is damaged, or parts are missing between them.
    """
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise CheckpointError(f"{directory}: not a readable checkpoint: it holds no *{SUFFIX}")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:  # torch's reader does not say which
            raise CheckpointError(f"{file}: cannot be read, or not whole: {error}. Use another checkpoint.") from error
    entries = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    index = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if broken := sorted(_with_gaps(index)):
        raise CheckpointError(
            f"{directory}: not whole: parts of {', '.join(broken[:3])} are in none of its {len(files)} file(s). "
            "Use another checkpoint."
        )
    return index


def _with_gaps(index: dict[str, TensorStorageMetadata]) -> Iterator[str]:
    for name, entry in index.items():
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            yield name


class AsyncWriter:
    """One rank's side; all ranks call :meth:`begin` together. At most one checkpoint is on its way.

    The state is copied first, then written from the copy by a thread. The ranks of the threads talk over a process
    group of their own, since the training's collectives go on meanwhile.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def begin(self, state: Mapping[str, Any], directory: Path, completed: Callable[[], None]) -> None:
        """Start to write ``state``; returns when it may be changed again (a collective).

        Args:
            completed: called in the thread when every rank has written its part.
        """
        self.wait()
        if self._group is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
            self._group = group
        future = async_save(dict(state), storage_writer=ShardWriter(directory), process_group=self._group)
        assert not isinstance(future, AsyncSaveResponse)  # that is for stagers of one's own

        def finish() -> None:
            future.result()
            completed()

        self._pending = self._thread.submit(finish)

    def wait(self) -> None:
        """Return when nothing is on its way.

        Raises:
            Exception: why it could not be written; once.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
