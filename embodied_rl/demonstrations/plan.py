"""The episodes that a collection plays, and the record of it in the data set's folder. No torch, no pyarrow.

An episode depends on the configuration and on its position in the plan (task, demonstration, attempt), on nothing else;
without noise, where it would be the same again from the same state, also on what the data set had before. So any number
of workers gives the same data, and a collection that was stopped resumes as if it had not been.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from embodied_rl.envs.base import params_of_episodes
from embodied_rl.envs.reset_states import after_evaluation
from embodied_rl.errors import UserError
from embodied_rl.files import parse_json
from embodied_rl.params import at
from embodied_rl.schema import CollectConfig, CollectSection, EnvConfig, PlaySection
from embodied_rl.seeding import generator

CONFIG: Final = "meta/collection.yaml"
"""The configuration that the data set's episodes were played with."""
WEIGHTS: Final = "meta/weights.json"
"""Key -> :class:`Played`, as JSON, of the data set's first episodes: a run's folder gets newer checkpoints."""
_PARAMS: Final = "env.init_params"
_DECISIVE: Final = (
    "env.env_type",
    _PARAMS,
    "env.seed",
    "collect.policy",
    "collect.teacher",
    "collect.takeover_after",
    "collect.max_episode_steps",
    "collect.keep_failures",
    "collect.skip_states",
    "collect.seed",
    "collect.noise",
    "collect.noise_bursts",
    "collect.image_format",
)
"""Keys (or sections) that an episode depends on, whoever plays."""
_EARLIER: Final[Mapping[str, Any]] = {"collect.expert_params": {}}
"""Key -> what it was in configurations that have none yet; None for others."""


Key = tuple[int, int, int]
"""(task, demonstration, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A checkpoint that plays."""

    checkpoint: str
    sha256: str
    """Of its state file, which has the checksums of the others: a run that has moved still has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An episode to play."""

    task_id: int
    demonstration: int
    number: int
    """Number of attempts at the demonstration that come before."""
    reset_state_id: int
    takeover: int = 0
    """Control steps that the learner plays before the expert, or whoever demonstrates, does."""

    def generators(self, seed: int) -> tuple[np.random.Generator, np.random.Generator]:
        """Two independent generators: for the player's own choices, and for the noise."""
        key = (self.task_id, self.demonstration, self.number)
        return generator(seed, spawn_key=(*key, 0)), generator(seed, spawn_key=(*key, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A demonstration that is still wanted: its attempts, to be played until one succeeds."""

    task_id: int
    attempts: tuple[Attempt, ...]


def plan(
    tasks: Mapping[int, range],
    section: PlaySection,
    outcomes: Mapping[Key, bool],
    *,
    played: Collection[int] = (),
    first: int = 0,
    alone: float = 0.0,
) -> list[Job]:
    """The jobs that are left, ordered by task.

    Args:
        tasks: task id -> its initial states.
        first: number of each task's first demonstration.
        alone: share of the episodes in which nobody plays before a takeover.
        outcomes: success of attempts that need not be played again.
        played: their initial states.

    Raises:
        UserError: a task has too few initial states.
    """
    jobs = []
    for task_id, states in tasks.items():
        starts = _starts(task_id, _usable(task_id, states, section), section, outcomes, played, first)
        for demonstration in range(first, first + section.episodes_per_task):
            keys = [(task_id, demonstration, number) for number in range(section.max_attempts)]
            left = tuple(_attempt(key, starts[key], section, alone) for key in keys if key in starts)
            if left and not any(outcomes.get(key) for key in keys):
                jobs.append(Job(task_id=task_id, attempts=left))
    return jobs


def share(jobs: Sequence[Job], rank: int, world_size: int) -> list[Job]:
    """One worker's jobs: neighbours, so that it meets few tasks."""
    bounds = np.linspace(0, len(jobs), world_size + 1).round().astype(int)
    return list(jobs[bounds[rank] : bounds[rank + 1]])


def _usable(task_id: int, states: range, section: PlaySection) -> range:
    key = section_name(section)
    usable = after_evaluation({task_id: states}, skip=section.skip_states, key=f"{key}.skip_states")[task_id]
    if section.episodes_per_task > len(usable) and not section.varies:
        raise UserError(
            f"{key}.episodes_per_task: got {section.episodes_per_task}, but task {task_id} has {len(usable)} initial "
            "states for demonstrations, and without noise an episode would be recorded twice; ask for fewer, or set "
            f"{key}.noise"
        )
    return usable


def _starts(
    task_id: int,
    usable: range,
    section: PlaySection,
    outcomes: Mapping[Key, bool],
    played: Collection[int],
    first: int,
) -> dict[Key, int]:
    """The initial state of each attempt without an outcome. When states run out they are used again, or, where an
    episode would be the same again, further attempts have none.

    Attempts that a success makes needless have one, too, so that the others keep theirs whichever were played before.
    """
    size = section.episodes_per_task
    rows = [(task_id, first + d, number) for number in range(section.max_attempts) for d in range(size)]
    wanted = [key for key in rows if key not in outcomes]
    if section.varies:
        return {(task, d, number): usable[(d + number * size) % len(usable)] for task, d, number in wanted}
    return dict(zip(wanted, (state for state in usable if state not in played), strict=False))


def _attempt(key: Key, reset_state_id: int, section: PlaySection, alone: float) -> Attempt:
    task_id, demonstration, number = key
    attempt = Attempt(task_id=task_id, demonstration=demonstration, number=number, reset_state_id=reset_state_id)
    return replace(attempt, takeover=_takeover(attempt, section, alone))


def _takeover(attempt: Attempt, section: PlaySection, alone: float) -> int:
    """When the expert takes over, in control steps."""
    if section.takeover_after is None:
        return 0
    rng = generator(section.seed, spawn_key=(attempt.task_id, attempt.demonstration, attempt.number, 2))
    least, most = section.takeover_after
    after = int(rng.integers(least, most, endpoint=True))
    return 0 if rng.random() < alone else after


def evaluated_too(section: PlaySection, evaluated: int) -> str | None:
    """A warning where demonstrations begin in initial states that an evaluation plays: each task's first so many."""
    if section.skip_states >= evaluated:
        return None
    name = section_name(section)
    return (
        f"{name}.skip_states={section.skip_states}: demonstrations may begin in initial states that are evaluated, the "
        f"first {evaluated} of a task (env.eval.episodes_per_task); to leave all of those alone set {name}.skip_states="
        f"{evaluated}"
    )


def section_name(section: PlaySection) -> str:
    """The section's name in the configuration."""
    return "collect" if isinstance(section, CollectSection) else "dagger"


def takeover_problems(section: PlaySection) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if section.takeover_after is None:
        return
    least, most = section.takeover_after
    if not least <= most < section.max_episode_steps:
        yield (
            f"{section_name(section)}.takeover_after: got {section.takeover_after}, expected two numbers of control "
            f"steps, the smaller first, below {section_name(section)}.max_episode_steps={section.max_episode_steps}"
        )


def other_params(played: Mapping[str, Any], env: EnvConfig) -> dict[str, tuple[Any, Any]]:
    """Name -> (what it was, what it is) of each of ``env.init_params`` that makes the episodes of the configuration
    ``played`` others than those of ``env``, whose type is the same; an adapter's own has its default where it is not
    given, and None is a name that is not there."""
    was = params_of_episodes(env.env_type, at(played, _PARAMS) or {})
    now = params_of_episodes(env.env_type, env.init_params)
    return {key: (was.get(key), now.get(key)) for key in {**was, **now} if was.get(key) != now.get(key)}


def conflicts(config: CollectConfig, weights: Mapping[str, Played]) -> Iterator[str]:
    """Reasons, a message each, why the collection cannot go to ``collect.path``: other settings made what is there.

    Args:
        weights: key -> checkpoint that it means now, of those that play.
    """
    root = Path(config.collect.path)
    if not root.exists():
        return
    if not root.is_dir():
        yield f"collect.path: got {root}, which is a file; give a folder"
        return
    path = root / CONFIG
    if not path.is_file():
        if any(root.iterdir()):
            yield f"collect.path: got {root}, which holds something else than a collection; give another folder"
        return
    try:
        before = yaml.safe_load(path.read_text())
        first = parse_json((root / WEIGHTS).read_text()) if (root / WEIGHTS).is_file() else {}
        played = {key: Played(**of) for key, of in first.items()}
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        yield f"collect.path: {path} cannot be read ({error}); give another folder"
        return
    now = yaml.safe_load(yaml.safe_dump(asdict(config)))
    collect = config.collect
    decisive: list[str] = [*_DECISIVE]
    if collect.scripted:
        decisive += ["collect.expert", "collect.expert_params", "collect.expert_noise"]
    if collect.noise and not collect.noise_bursts:
        decisive.append("collect.noise_correlation")
    if "success_return" in config.env.init_params:
        decisive.append("env.use_rel_reward")
    if collect.learner_plays:
        decisive += ["model", "runner.init_from"]
    if collect.learner_plays or not collect.scripted:
        decisive.append("collect.temperature")
    was = {key: _EARLIER.get(key) if (value := at(before, key)) is None else value for key in decisive}
    wanted = {key: at(now, key) for key in decisive}
    for key, then in played.items():
        given = weights.get(key)
        same = given is not None and given.sha256 == then.sha256
        was[key], wanted[key] = then.checkpoint, then.checkpoint if same else given and given.checkpoint
    differing = [key for key in was if was[key] != wanted[key]]
    if _PARAMS in differing and not other_params(before, config.env):
        differing.remove(_PARAMS)
    if differing:
        changes = "; ".join(f"{key} was {was[key]}, now {wanted[key]}" for key in differing)
        yield (
            f"collect.path: the episodes in {root} were played with other settings: {changes}. Set them as they were, "
            "or give another collect.path"
        )
