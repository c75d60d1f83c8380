"""``eval.json``: its version, writing it, finding it and reading it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from embodied_rl.errors import UserError
from embodied_rl.files import parse_json, set_aside

FILE_NAME: Final = "eval.json"
SCHEMA_VERSION: Final = 2
"""Rises when a field changes its meaning or goes away, not when one is added. Files without it list no episodes."""
EPISODES: Final = "episodes"
"""``kind`` of an evaluation in a simulator."""
COMPLETIONS: Final = "completions"
"""``kind`` of an evaluation of a language model."""


def number_or_null(value: float | None, digits: int = 6) -> float | None:
    """A rounded number; None, which JSON has a word for, where there is none or it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEntry:
    """The part of an episode's entry that a comparison needs."""

    task_id: int
    instruction: str
    reset_state_id: int
    seed: int | None
    success: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionEntry:
    """The part of a completion's entry that a comparison needs."""

    prompt_id: str
    prompt: int
    source: str
    correct: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an episode, or of all completions of a prompt."""

    task: int | str
    """Task id, or the prompt's source."""
    label: str
    """Instruction, or the prompt's source."""
    score: float | None
    """1 for success; the share of a prompt's verified completions that are correct; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEvaluation:
    """The content of an ``eval.json``."""

    path: Path
    name: str
    """Its name in messages and tables."""
    kind: str
    """:data:`EPISODES` or :data:`COMPLETIONS`."""
    meta: Mapping[str, Any]
    outcomes: Mapping[Hashable, Outcome]
    """By what was asked: (task id, reset state id, seed), or (prompt id, how often it came before)."""


def read_evaluation(path: Path, name: str = "") -> SavedEvaluation:
    """Read an ``eval.json``, and give it a name.

    Raises:
        UserError: it is none, lists no episodes (written before schema version 2), or is of a later version.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("meta"), dict) or "overall" not in content:
        raise UserError(f"{path}: is no evaluation's eval.json: expected the sections meta and overall")
    version = content.get("schema_version", 1)
    if version == 1:
        raise UserError(
            f"{path}: lists no episodes, as files before schema version 2; evaluate the checkpoint again, with "
            "runner.only_eval=true runner.resume_dir=<run directory or checkpoint>"
        )
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version: got {version!r}, expected {SCHEMA_VERSION}; a later release wrote it, so use that"
        )
    kinds = {EPISODES: _episode_outcomes, COMPLETIONS: _completion_outcomes}
    kind = content.get("kind")
    if kind not in kinds:
        raise UserError(f"{path}: kind: got {kind!r}, expected {' or '.join(kinds)}")
    try:
        outcomes = kinds[kind](content.get(kind))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(map(str, (kind, *found["loc"])))
        raise UserError(f"{path}: {where}: {found['msg']}") from None
    if not outcomes:
        raise UserError(f"{path}: {kind}: the list is empty, so there is nothing to compare")
    if kind == EPISODES and len(outcomes) < len(content[kind]):
        raise UserError(f"{path}: {kind}: {len(content[kind])} entries, but {len(outcomes)} different episodes")
    return SavedEvaluation(path=path, name=name, kind=kind, meta=content["meta"], outcomes=outcomes)


def _episode_outcomes(entries: object) -> dict[Hashable, Outcome]:
    episodes = TypeAdapter(list[EpisodeEntry]).validate_python(entries)
    return {
        (e.task_id, e.reset_state_id, e.seed): Outcome(task=e.task_id, label=e.instruction, score=float(e.success))
        for e in episodes
    }


def _completion_outcomes(entries: object) -> dict[Hashable, Outcome]:
    prompts: dict[int, list[CompletionEntry]] = {}
    for entry in TypeAdapter(list[CompletionEntry]).validate_python(entries):
        prompts.setdefault(entry.prompt, []).append(entry)
    outcomes: dict[Hashable, Outcome] = {}
    before: Counter[str] = Counter()  # A data set may ask the same twice.
    for group in prompts.values():
        first, verified = group[0], [entry.correct for entry in group if entry.correct is not None]
        score = sum(verified) / len(verified) if verified else None
        key = (first.prompt_id, before[first.prompt_id])
        before[first.prompt_id] += 1
        outcomes[key] = Outcome(task=first.source, label=first.source, score=score)
    return outcomes


def find_evaluation(argument: str) -> Path:
    """The ``eval.json`` that an argument means: a file, a folder with one, the newest evaluation of a run directory,
    or of an experiment's newest run that has one; ``:<step>`` after a directory: the evaluation after that step.

    Raises:
        UserError: there is none.
    """
    path, step = Path(argument), None
    if not path.exists() and (match := re.fullmatch(r"(.+):(\d+)", argument)):
        path, step = Path(match[1]), int(match[2])
    if path.is_file() and step is None:
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such {'directory' if step is not None else 'file or directory'}")
    if step is None and (path / FILE_NAME).is_file():
        return path / FILE_NAME
    runs = [path, *sorted((child for child in path.iterdir() if child.is_dir()), reverse=True)]
    evaluations = next(filter(None, map(evaluations_of, runs)), None)
    if evaluations is None:
        raise UserError(
            f"{path}: holds no evaluation; expected an {FILE_NAME}, a run directory with eval_step_<n> folders, or its "
            "parent"
        )
    if step is None:
        return evaluations[max(evaluations)]
    if step not in evaluations:
        there = ", ".join(map(str, sorted(evaluations)))
        raise UserError(f"{argument}: no evaluation after step {step}; there are those after step {there}")
    return evaluations[step]


def evaluations_of(run: Path) -> dict[int, Path]:
    """Step -> the file of its evaluation."""
    return {step: file for step, folder in _folders(run).items() if (file := folder / FILE_NAME).exists()}


def set_later_aside(directory: Path, step: int) -> list[Path]:
    """Rename the folders of evaluations after later steps, or of their videos, so that they no longer count; returns
    what they were."""
    later = [folder for number, folder in sorted(_folders(directory).items()) if number > step]
    for folder in later:
        set_aside(folder, "former")
    return later


def _folders(directory: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"eval_step_(\d+)", path.name), path) for path in directory.glob("eval_step_*"))
    return {int(match[1]): path for match, path in found if match}
