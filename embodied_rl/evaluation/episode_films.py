"""Which video an episode's frames go to, where the envs that play them take one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied_rl.evaluation.video import VideoRecorder


@dataclass(frozen=True, slots=True)
class Film:
    """A video of some episodes."""

    recorder: VideoRecorder
    tiles: Mapping[int, int]
    """Number of the episode -> the index that its tile has in the recorder."""


class EpisodeFilms:
    """Takes the frames of envs, and gives each episode's to the film that it belongs to, if there is one.

    Args:
        films: of different episodes.
        playing: env id -> the number of its present episode.
    """

    def __init__(self, films: Iterable[Film], playing: Callable[[int], int]) -> None:
        self._films = {number: film for film in films for number in film.tiles}
        self._playing = playing

    def of(self, number: int) -> Film | None:
        """The film that an episode belongs to."""
        return self._films.get(number)

    def wants(self, env_index: int) -> bool:
        number = self._playing(env_index)
        film = self._films.get(number)
        return film is not None and film.recorder.wants(film.tiles[number])

    def record(
        self,
        env_index: int,
        frame: NDArray[np.uint8],
        *,
        instruction: str,
        episode_step: int,
        reward: float,
        success: bool,
    ) -> None:
        number = self._playing(env_index)
        film = self._films[number]
        film.recorder.record(
            film.tiles[number],
            frame,
            instruction=instruction,
            episode_step=episode_step,
            reward=reward,
            success=success,
        )
