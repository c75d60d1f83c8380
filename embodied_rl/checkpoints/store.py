"""The folders of checkpoints: where they are, how one becomes visible, and whether it is still what was saved.

A run's checkpoints are ``<run>/checkpoints/global_step_<N>/``, each with ``actor/`` (see ``shards.py``) and
``state.json``. A checkpoint is written to a hidden neighbour and renamed when complete, and renamed to a hidden
neighbour before it is deleted: a directory that has the right name is whole, whenever the run was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from embodied_rl.errors import CheckpointError, listed
from embodied_rl.files import hidden_neighbour, remove, write_synced
from embodied_rl.schema import Config

STATE_FILE = "state.json"
_NAME = re.compile(r"global_step_(\d+)")
_HIDDEN = ".global_step_*"
_KINDS: Final = (".safetensors", ".json")
"""All that a checkpoint consists of; neither can hold code."""
_PICKLES: Final = (".metadata", ".distcp")
"""Ends of names in checkpoints of earlier versions."""
_THREADS: Final = 8
_held: Final[list[int]] = []
"""Descriptors of the folder that this process writes, locked."""
_FORMER: Final = (
    "it is of an earlier version, whose checkpoints are pickles. As reading them can run code, they were not opened. "
    "If you trust it, export it with the version that wrote it (python train.py export), and use that as model.path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """A file as it was saved."""

    bytes: int
    sha256: str
    """In hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The rest of what a run needs to resume, beside weights and optimiser.

    Randomness is a function of seed and step everywhere, so the step is all that has to be remembered of it.
    """

    step: int
    """Finished training steps; the next one has this number."""
    policy_version: int
    initial: str | None = None
    """The checkpoint whose weights the run began with (``runner.init_from``), and its reference policy has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A checkpoint to complete once its contents are written: :func:`seal`, then :func:`publish`."""

    scratch: Path
    directory: Path
    state: RunState
    max_keep: int | None


EVALUATION: Final = "-eval"
"""End of the name of a run directory in which nothing was trained."""


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step}"


def experiment_dir(config: Config) -> Path:
    """The directory of the experiment's runs."""
    return Path(config.runner.output_dir) / config.runner.experiment_name


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to resume or to evaluate; None to start afresh.

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


def begin(directory: Path) -> Path:
    """A clean hidden directory to write the checkpoint to that :func:`publish` will call ``directory``.

    What killed runs left behind is removed; what another process still writes stays.
    """
    while _held:  # of a checkpoint that is complete, or was given up
        os.close(_held.pop())
    for leftover in directory.parent.glob(_HIDDEN):
        _remove_unless_held(leftover, lockless=True)  # this run's own, as it trains alone in its directory
    scratch = hidden_neighbour(directory, "writing")
    while True:
        scratch.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):
            _held.append(_locked(scratch, fcntl.LOCK_EX))
            if scratch.exists():  # nobody was before us with the lock, and took it for left behind
                return scratch
            os.close(_held.pop())


def _locked(folder: Path, operation: int) -> int:
    """A file descriptor that holds the folder's lock, whatever it is called later."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks, or another process holds it already
        fcntl.flock(descriptor, operation)
    return descriptor


def remove_torn(experiment_dir: Path) -> list[Path]:
    """Delete what killed runs of an experiment left of checkpoints that they were writing; returns what it was."""
    removed: list[Path] = []
    for path in experiment_dir.glob(f"*/checkpoints/{_HIDDEN}"):
        with contextlib.suppress(OSError):
            if _remove_unless_held(path, lockless=False):
                removed.append(path)
    return removed


def _remove_unless_held(path: Path, *, lockless: bool) -> bool:
    """Delete a hidden folder, unless a run still writes it; returns whether it did. Such a folder is locked, and the
    system lifts the lock when the process dies.

    Args:
        lockless: delete it also where the file system has no locks, and nobody knows.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not lockless:
                return False
        shutil.rmtree(path)
    finally:
        os.close(folder)
    return True


def seal(scratch: Path, state: RunState) -> None:
    """Write a checkpoint's last file: its state, and the checksums of all others."""
    files = {path: asdict(saved) for path, saved in _sums(scratch, _contents(scratch)).items()}
    content = {**asdict(state), "files": files}
    text = json.dumps({**content, "sha256": _sum(content)}, indent=2) + "\n"
    write_synced(scratch / STATE_FILE, text.encode())


def publish(scratch: Path, directory: Path, *, max_keep: int | None) -> None:
    """Give a sealed checkpoint its name; then drop the oldest ones beyond ``max_keep``.

    Checkpoints of later steps, from before the run was resumed at an earlier one, neither count nor are dropped.
    """
    with _out_of_the_way(directory):
        scratch.rename(directory)
    if max_keep is not None:
        upto = complete_checkpoints(directory.parent)
        upto = upto[: upto.index(directory) + 1]
        for old in upto[:-max_keep]:
            with _out_of_the_way(old):
                pass


@contextlib.contextmanager
def _out_of_the_way(checkpoint: Path) -> Iterator[None]:
    """A checkpoint, if it exists, has a hidden name in the block and is deleted after it, so that a half-deleted one
    does not pass for a whole one. It is locked, or another run's start would take it for left behind."""
    if not (checkpoint.exists() or checkpoint.is_symlink()):
        yield
        return
    hidden = hidden_neighbour(checkpoint, "removed")
    lock = None if checkpoint.is_symlink() else _locked(checkpoint, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        checkpoint.rename(hidden)
        yield
        remove(hidden)
    finally:
        if lock is not None:
            os.close(lock)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints in a run's ``checkpoints`` directory, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def later_checkpoints(checkpoint: Path) -> list[Path]:
    """Whole checkpoints of the same run and of later steps, oldest first: from before it was resumed here.

    Raises:
        CheckpointError: ``checkpoint`` is none.
    """
    step = read_state(checkpoint).step
    return [path for path in complete_checkpoints(checkpoint.parent) if int(path.name.rpartition("_")[2]) > step]


def newest_whole(
    checkpoints: Sequence[Path], damaged: Callable[[Path, CheckpointError], None] = lambda checkpoint, error: None
) -> Path | None:
    """Of checkpoints, oldest first, the last one that is what was saved; every byte of it is read.

    Args:
        damaged: told of those that are not, and how.
    """
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            damaged(checkpoint, error)
        else:
            return checkpoint
    return None


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
        CheckpointError: it is missing, torn, or not one, or :func:`refuse_strangers` finds some.
    """
    return _read(directory)[0]


def verify(directory: Path) -> Mapping[str, FileSum]:
    """Compare a checkpoint's files with their checksums.

    Every byte is read, about a gibibyte a second and file. Nothing that could run code is opened.

    Returns:
        Path -> size and checksum.

    Raises:
        CheckpointError: a file is damaged, missing or not of the checkpoint; all such files are named. Or the
            checkpoint is of an earlier version.
    """
    _, saved = _read(directory)
    try:
        found = _differences(directory, saved)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error}); use another checkpoint of the run") from error
    if found:
        raise CheckpointError(
            f"{directory} is not what was saved:\n"
            + "\n".join(f"  {text}" for text in found)
            + "\nUse another checkpoint of the run, or copy this one again."
        )
    return saved


def refuse_strangers(directory: Path) -> None:
    """See that there are no files among a checkpoint's that could run code when they are read.

    Raises:
        CheckpointError: there are; they are named, and were not opened.
    """
    names = sorted(path for path in _files(directory) if not path.endswith(_KINDS))
    if former := [name for name in names if name.endswith(_PICKLES)]:
        raise CheckpointError(f"{directory}: holds {listed(former, 3)}: {_FORMER}")
    if names:
        raise CheckpointError(
            f"{directory}: holds {listed(names, 3)}, which is no part of a checkpoint (*.safetensors and *.json) and "
            "was not opened, as reading it could run code; find out where it is from, and remove it"
        )


def _read(directory: Path) -> tuple[RunState, dict[str, FileSum]]:
    """Read :data:`STATE_FILE` as :func:`seal` wrote it, with a checksum of itself."""
    refuse_strangers(directory)
    path = directory / STATE_FILE
    advice = "use another checkpoint of the run"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if isinstance(content, dict) and content.keys() == {"step", "policy_version"}:
            raise CheckpointError(f"{path}: has no checksums: {_FORMER}")
        expected = content.pop("sha256")
        state = RunState(step=content["step"], policy_version=content["policy_version"], initial=content.get("initial"))
        files = {name: FileSum(**fields) for name, fields in content["files"].items()}
    except KeyError as error:
        raise CheckpointError(f"{path}: cannot be read (it has no {error}); {advice}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {advice}") from error
    if not all(type(number) is int and number >= 0 for number in (state.step, state.policy_version)):
        raise CheckpointError(f"{path}: got step {state.step}, policy_version {state.policy_version}; {advice}")
    if _sum(content) != expected:
        raise CheckpointError(f"{path}: is not what was saved (another SHA-256); {advice}")
    if (named := _NAME.fullmatch(directory.name)) and int(named[1]) != state.step:
        raise CheckpointError(f"{directory}: is of step {state.step}, not {named[1]}; give it its name back")
    return state, files


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sums(directory: Path, paths: Iterable[str]) -> dict[str, FileSum]:
    """Path relative to ``directory`` -> sum. Files are read side by side, a gibibyte a second each."""
    names = sorted(paths)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _file_sum(directory / name), names), strict=True))


def _differences(directory: Path, saved: Mapping[str, FileSum]) -> list[str]:
    """Differences between a checkpoint's files and those that were saved, a line each."""
    here = _contents(directory)
    sizes = {path: (directory / path).stat().st_size for path in saved.keys() & here}
    same_size = [path for path, size in sizes.items() if size == saved[path].bytes]
    return sorted(
        [f"{path} is missing" for path in saved.keys() - here]
        + [f"{path} was not saved with it: remove it" for path in here - saved.keys()]
        + [
            f"{path} has {size} bytes, {saved[path].bytes} were saved"
            for path, size in sizes.items()
            if size != saved[path].bytes
        ]
        + [
            f"{path} is not what was saved (another SHA-256)"
            for path, now in _sums(directory, same_size).items()
            if now != saved[path]
        ]
    )


def _contents(directory: Path) -> set[str]:
    """All files that :data:`STATE_FILE` vouches for."""
    return set(_files(directory)) - {STATE_FILE}


def _files(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(directory).as_posix()


def _file_sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(bytes=file.tell(), sha256=digest.hexdigest())
