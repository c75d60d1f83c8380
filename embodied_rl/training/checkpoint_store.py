"""Where checkpoints are, and how one becomes visible. No torch here: the command line checks paths before loading it.

A run's checkpoints are ``<run>/checkpoints/global_step_<N>/``, each with ``actor/`` (see ``checkpoint.py``) and
``state.json``. A checkpoint is written to a hidden neighbour and renamed when complete, and renamed to a hidden
neighbour before it is deleted: a directory that has the right name is whole, whenever the run was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from embodied_rl.errors import CheckpointError
from embodied_rl.schema import Config

STATE_FILE = "state.json"
_NAME = re.compile(r"global_step_(\d+)")
_HIDDEN = ".global_step_*"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run needs, beside weights and optimiser, to go on.

    Randomness is a function of seed and step everywhere, so the step is all that has to be remembered of it.
    """

    step: int
    """Finished training steps; the next one has this number."""
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What it takes to complete a checkpoint once its contents are written: see :func:`publish`."""

    scratch: Path
    directory: Path
    state: RunState
    max_keep: int | None

    def publish(self) -> None:
        publish(self.scratch, self.directory, self.state, max_keep=self.max_keep)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step}"


def experiment_dir(config: Config) -> Path:
    """Where the experiment's runs are."""
    return Path(config.runner.output_dir) / config.runner.experiment_name


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to go on from or to evaluate; None to start afresh.

    Raises:
        CheckpointError: as :func:`resolve`, or an evaluation asks for ``auto`` and there is nothing to evaluate.
    """
    resume_dir, runs = config.runner.resume_dir, experiment_dir(config)
    found = None if resume_dir is None else resolve(resume_dir, runs)
    if found is None and resume_dir is not None and config.runner.only_eval:
        raise CheckpointError(
            f"runner.resume_dir={resume_dir}: no run in {runs} has a whole checkpoint to evaluate; train first, "
            "set runner.experiment_name, give a path, or leave it out to evaluate the untrained policy"
        )
    return found


def find_initial(config: Config) -> Path | None:
    """The checkpoint whose weights a run starts from that resumes none; None for fresh ones.

    Raises:
        CheckpointError: as :func:`resolve`.
    """
    start = config.runner.init_from
    return None if start is None else resolve(start, Path(start), key="runner.init_from")


def initial_weights(config: Config) -> Path | None:
    """:func:`find_initial`, where the run has a use for it: it resumes nothing, or has a reference policy."""
    if config.runner.init_from is None:
        return None
    return find_initial(config) if config.algorithm.kl_beta > 0 or find_checkpoint(config) is None else None


def begin(directory: Path) -> Path:
    """A clean hidden place to write the checkpoint to that :func:`publish` will call ``directory``.

    What killed runs left behind is removed.
    """
    for leftover in directory.parent.glob(_HIDDEN):
        shutil.rmtree(leftover)
    scratch = directory.with_name(f".{directory.name}.writing")
    scratch.mkdir(parents=True)
    return scratch


def publish(scratch: Path, directory: Path, state: RunState, *, max_keep: int | None) -> None:
    """Complete a checkpoint: its state, then its name; then drop the oldest ones beyond ``max_keep``.

    Checkpoints of later steps, from before the run was resumed at an earlier one, neither count nor are dropped.
    """
    with (scratch / STATE_FILE).open("w") as file:
        file.write(json.dumps(asdict(state), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _remove(directory)
    scratch.rename(directory)
    if max_keep is not None:
        upto = complete_checkpoints(directory.parent)
        upto = upto[: upto.index(directory) + 1]
        for old in upto[:-max_keep]:
            _remove(old)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint, if it exists, so that a half-deleted one does not pass for a whole one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    if checkpoint.exists():
        checkpoint.rename(hidden)
        shutil.rmtree(hidden)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints in a run's ``checkpoints`` directory, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def resolve(resume_dir: str, experiment_dir: Path, *, key: str = "runner.resume_dir") -> Path | None:
    """The checkpoint that ``runner.resume_dir`` means.

    Args:
        resume_dir: ``auto``, a checkpoint, a run directory, or that of an experiment: the newest of its newest run.
        key: the config key, for messages.
        experiment_dir: where ``auto`` looks: the newest checkpoint of the newest run that has one.

    Returns:
        None only for ``auto`` where no run has a checkpoint.

    Raises:
        CheckpointError: the path does not exist or holds no whole checkpoint.
    """
    if resume_dir == "auto":
        return _newest(experiment_dir)
    path = Path(resume_dir)
    if not path.is_dir():
        raise CheckpointError(f"{key}={resume_dir}: no such directory")
    if (path / STATE_FILE).is_file():
        return path
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    newest = found[-1] if found else _newest(path)
    if newest is None:
        raise CheckpointError(
            f"{key}={resume_dir}: holds no whole checkpoint (checkpoints/global_step_<N>/{STATE_FILE})"
        )
    return newest


def _newest(experiment_dir: Path) -> Path | None:
    """The newest checkpoint of the newest run that has one."""
    for run in sorted(experiment_dir.glob("*"), reverse=True):
        if found := complete_checkpoints(run / "checkpoints"):
            return found[-1]
    return None


def read_state(directory: Path) -> RunState:
    """A checkpoint's :class:`RunState`.

    Raises:
        CheckpointError: it is missing, torn, or not one.
    """
    path = directory / STATE_FILE
    try:
        fields = json.loads(path.read_text())
        state = RunState(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of the run") from error
    if not all(type(value) is int for value in fields.values()):
        raise CheckpointError(f"{path}: got {fields}, expected whole numbers; use another checkpoint of the run")
    return state
