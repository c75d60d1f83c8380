"""How often each task is played: success so far, its file in a checkpoint, and shares of a rollout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from embodied_rl.errors import CheckpointError
from embodied_rl.files import parse_json, write_synced

if TYPE_CHECKING:
    from embodied_rl.contracts import EpisodeRecord

FILE: Final = "envs/task_success.json"
"""Within a checkpoint."""
MEMORY: Final = 0.8
"""What an episode counts for, one training step later, of what it counted for before."""
UNKNOWN: Final = 0.25
"""Weight of a task that nobody has played: the largest."""


class TaskSuccess:
    """Success of each task in the last training steps.

    A task weighs p(1 - p), where p is its success rate with one success and one failure added: the variance of a
    success, in which an advantage originates. No weight is 0, and the less a task is played the sooner its record
    fades, so each is tried again.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}
        """Task -> successes, episodes."""

    def add(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Note what ended in a training step; what was before it fades."""
        self._counts = {task: (MEMORY * s, MEMORY * n) for task, (s, n) in self._counts.items()}
        for episode in episodes:
            successes, count = self._counts.get(episode.task_id, (0.0, 0.0))
            self._counts[episode.task_id] = (successes + episode.success, count + 1.0)

    def weights(self) -> dict[int, float]:
        """Task -> weight; tasks that were never played are missing."""
        rates = {task: (s + 1.0) / (n + 2.0) for task, (s, n) in self._counts.items()}
        return {task: rate * (1.0 - rate) for task, rate in rates.items()}

    def write(self, directory: Path) -> None:
        """Put it into the checkpoint ``directory``.

        Raises:
            OSError: it cannot be written, as where the disk is full.
        """
        path = directory / FILE
        path.parent.mkdir(exist_ok=True)
        write_synced(path, json.dumps(self._counts).encode())

    @classmethod
    def read(cls, directory: Path) -> TaskSuccess | None:
        """What :meth:`write` put into the checkpoint ``directory``; None where there is nothing of it.

        Raises:
            CheckpointError: the file cannot be read, or is not such a one.
        """
        path = directory / FILE
        if not path.is_file():
            return None
        success = cls()
        try:
            counts = parse_json(path.read_bytes())
            success._counts = {int(task): (float(s), float(n)) for task, (s, n) in counts.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of the run") from error
        return success


def shares(
    num_groups: int, task_ids: Sequence[int], weights: Mapping[int, float] | None, rng: np.random.Generator
) -> NDArray[np.int64]:
    """[len(task_ids)]: groups of each task, ``num_groups`` in all.

    Each task gets its share, rounded down. What is left goes to different tasks, drawn: with weights, by what rounding
    took from each.

    Args:
        weights: task -> weight, above 0; one that is missing weighs :data:`UNKNOWN`. None: all tasks alike.
    """
    if weights is None:
        per_task, rest = divmod(num_groups, len(task_ids))
        counts = np.full(len(task_ids), per_task)
        counts[rng.choice(len(task_ids), size=rest, replace=False)] += 1
        return counts
    wanted = np.array([weights.get(task, UNKNOWN) for task in task_ids])
    wanted = num_groups * wanted / wanted.sum()
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    lost = np.clip(wanted - counts, 0.0, None)
    if rest := num_groups - int(counts.sum()):
        counts[rng.choice(len(task_ids), size=rest, replace=False, p=lost / lost.sum())] += 1
    return counts
