"""The episodes that a collection plays, and the record of it in the data set's folder. No torch, no pyarrow.

An episode depends on the configuration and on its position in the plan (task, demonstration, attempt), on nothing else:
any number of workers gives the same data, and a collection that was stopped resumes as if it had not been.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from embodied_rl.envs.reset_states import after_evaluation
from embodied_rl.errors import UserError
from embodied_rl.params import at
from embodied_rl.schema import CollectConfig, CollectSection
from embodied_rl.seeding import generator

CONFIG: Final = "meta/collection.yaml"
"""The configuration that the data set's episodes were played with."""
_DECISIVE: Final = (
    "env.env_type",
    "env.init_params",
    "env.seed",
    "collect.policy",
    "collect.max_episode_steps",
    "collect.keep_failures",
    "collect.skip_states",
    "collect.seed",
    "collect.noise",
    "collect.noise_correlation",
    "collect.image_format",
)
_DECISIVE_FOR: Final[Mapping[str, tuple[str, ...]]] = {
    "expert": ("collect.expert_noise",),
    "model": ("model", "runner.init_from", "collect.temperature"),
}
"""Keys (or sections) that an episode depends on, and those that only one kind of policy reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An episode to play."""

    task_id: int
    demonstration: int
    number: int
    """Number of attempts at the demonstration that come before."""
    reset_state_id: int

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
    tasks: Mapping[int, range], collect: CollectSection, outcomes: Mapping[tuple[int, int, int], bool]
) -> list[Job]:
    """The jobs that are left, ordered by task.

    Args:
        tasks: task id -> its initial states.
        outcomes: (task, demonstration, attempt) -> success of attempts that need not be played again.

    Raises:
        UserError: a task has too few initial states.
    """
    jobs = []
    for task_id, states in tasks.items():
        usable = _usable(task_id, states, collect)
        for demonstration in range(collect.episodes_per_task):
            attempts = tuple(_attempts(task_id, usable, demonstration, collect))
            known = [outcomes.get((task_id, demonstration, a.number)) for a in attempts]
            left = tuple(a for a, outcome in zip(attempts, known, strict=True) if outcome is None)
            if left and True not in known:
                jobs.append(Job(task_id=task_id, attempts=left))
    return jobs


def share(jobs: Sequence[Job], rank: int, world_size: int) -> list[Job]:
    """One worker's jobs: neighbours, so that it meets few tasks."""
    bounds = np.linspace(0, len(jobs), world_size + 1).round().astype(int)
    return list(jobs[bounds[rank] : bounds[rank + 1]])


def _usable(task_id: int, states: range, collect: CollectSection) -> range:
    usable = after_evaluation({task_id: states}, skip=collect.skip_states, key="collect.skip_states")[task_id]
    varies = collect.noise > 0 or (collect.expert_noise if collect.policy == "expert" else collect.temperature > 0)
    if collect.episodes_per_task > len(usable) and not varies:
        raise UserError(
            f"collect.episodes_per_task: got {collect.episodes_per_task}, but task {task_id} has {len(usable)} initial "
            "states for demonstrations, and without noise an episode would be recorded twice; ask for fewer, or set "
            "collect.noise"
        )
    return usable


def _attempts(task_id: int, usable: range, demonstration: int, collect: CollectSection) -> Iterator[Attempt]:
    """Each from another initial state, as long as there are any."""
    for number in range(collect.max_attempts):
        yield Attempt(
            task_id=task_id,
            demonstration=demonstration,
            number=number,
            reset_state_id=usable[(demonstration + number * collect.episodes_per_task) % len(usable)],
        )


def conflicts(config: CollectConfig) -> Iterator[str]:
    """Reasons, a message each, why the collection cannot go to ``collect.path``: other settings made what is there."""
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
    except (OSError, yaml.YAMLError) as error:
        yield f"collect.path: {path} cannot be read ({error}); give another folder"
        return
    now = yaml.safe_load(yaml.safe_dump(asdict(config)))
    decisive = _DECISIVE + _DECISIVE_FOR[config.collect.policy]
    differing = [key for key in decisive if at(before, key) != at(now, key)]
    if differing:
        changes = "; ".join(f"{key} was {at(before, key)}, now {at(now, key)}" for key in differing)
        yield (
            f"collect.path: the episodes in {root} were played with other settings: {changes}. Set them as they were, "
            "or give another collect.path"
        )
