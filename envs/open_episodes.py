"""Episodes under way, and their file in a checkpoint.

With auto-reset an episode continues over rollouts and training steps, so it is part of a run's state. No simulator is
asked for its inside: an episode is a function of its initial state and its actions, and is played again from those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from embodied_rl.contracts import EpisodeRecord
from embodied_rl.errors import CheckpointError
from embodied_rl.files import write_synced

FILE: Final = "envs/episodes.safetensors"
"""Within a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpisode:
    """An env's episode that has not ended."""

    env_id: int
    number: int
    """Index among the env's episodes, from 0."""
    reset_state_id: int
    actions: NDArray[np.float32]
    """[steps, A], the actions since the reset."""
    state: NDArray[np.float32]
    """[S], the state that they led to; playing them again should lead there, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """The state of a run's envs between two training steps."""

    episodes: Sequence[OpenEpisode]
    unreported: Sequence[EpisodeRecord]
    """Episodes that ended and are in no metric yet."""
    settings: Mapping[str, Any]
    """Config key -> value: what makes the episodes what they are."""


def write(directory: Path, state: EnvState) -> None:
    """Put ``state`` into the checkpoint ``directory``, as numbers and JSON.

    Raises:
        OSError: it cannot be written, as where the disk is full.
    """
    episodes = sorted(state.episodes, key=lambda episode: episode.env_id)
    arrays: dict[str, NDArray[Any]] = {
        name: np.array([getattr(episode, name) for episode in episodes], dtype=np.int64)
        for name in ("env_id", "number", "reset_state_id")
    }
    arrays["steps"] = np.array([len(episode.actions) for episode in episodes], dtype=np.int64)
    arrays["actions"] = np.concatenate([episode.actions for episode in episodes])
    arrays["state"] = np.stack([episode.state for episode in episodes])
    metadata = {
        "unreported": json.dumps([asdict(record) for record in state.unreported]),
        "settings": json.dumps(state.settings),
    }
    path = directory / FILE
    path.parent.mkdir(exist_ok=True)
    # Not the library's save_file: its files are readable by their owner alone, and its errors are no OSError.
    write_synced(path, save(arrays, metadata=metadata))


def read(directory: Path) -> EnvState | None:
    """Load what :func:`write` put into the checkpoint ``directory``; None where it holds no episodes.

    Raises:
        CheckpointError: the file cannot be read, or is not such a one.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata()
        ends = arrays["steps"].cumsum()
        return EnvState(
            episodes=[
                OpenEpisode(
                    env_id=int(arrays["env_id"][row]),
                    number=int(arrays["number"][row]),
                    reset_state_id=int(arrays["reset_state_id"][row]),
                    actions=arrays["actions"][end - steps : end],
                    state=arrays["state"][row],
                )
                for row, (steps, end) in enumerate(zip(arrays["steps"], ends, strict=True))
            ],
            unreported=[EpisodeRecord(**record) for record in json.loads(metadata["unreported"])],
            settings=json.loads(metadata["settings"]),
        )
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of the run") from error
