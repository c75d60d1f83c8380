"""A lane's share of an evaluation: its episodes as they end, and the videos of those that are filmed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from embodied_rl.contracts import EpisodeRecord, EvaluatedEpisode
from embodied_rl.envs.episode_queue import EpisodeQueue
from embodied_rl.evaluation.episode_films import EpisodeFilms, Film
from embodied_rl.evaluation.video import VideoRecorder, video_name
from embodied_rl.monitoring.timers import PhaseTimer


class _MakeRecorder(Protocol):
    def __call__(self, *, only: Collection[int]) -> VideoRecorder: ...


class EvaluatedEpisodes:
    """Collects what became of a queue's episodes. Their initial states differ.

    Args:
        tasks: task -> its initial states.
        timer: of the worker; videos are phase ``video``.
    """

    def __init__(self, queue: EpisodeQueue, tasks: Mapping[int, range], timer: PhaseTimer) -> None:
        self._queue, self._tasks, self._timer = queue, tasks, timer
        self._numbers = {state: number for number, state in enumerate(queue.states) if state is not None}
        self._ended: dict[int, EpisodeRecord] = {}
        self._found: dict[int, EvaluatedEpisode] = {}
        self._films = EpisodeFilms([], queue.played_by)
        self._video_dir = Path()
        self.videos: list[Path] = []

    @property
    def episodes(self) -> list[EvaluatedEpisode]:
        """Those that :meth:`ended` was told of, in the queue's order, without any whose video is not written yet."""
        return [self._found[number] for number in sorted(self._found)]

    def film(
        self, states: Collection[int], env_ids: range, recorder: Callable[..., VideoRecorder], video_dir: Path
    ) -> EpisodeFilms:
        """Film the episodes that begin in ``states``: a video for those of a task that N envs would begin with at once.

        Args:
            env_ids: of the N envs.
            recorder: makes one, given ``only``, the envs that have a tile.

        Returns:
            What takes the frames.
        """
        width, tiles = len(env_ids), dict[tuple[int, int], dict[int, int]]()
        for state, number in self._numbers.items():
            if state in states:
                task = next(task for task, of_task in self._tasks.items() if state in of_task)
                tiles.setdefault((number // width, task), {})[number] = env_ids[number % width]
        films = [Film(recorder(only=of_film.values()), of_film) for of_film in tiles.values()]
        self._films, self._video_dir = EpisodeFilms(films, self._queue.played_by), video_dir
        return self._films

    def ended(self, records: Iterable[EpisodeRecord], *, policy_version: int) -> None:
        """Take what ended; write a video when the last of its episodes is among it."""
        for record in records:
            number = self._numbers[record.reset_state_id]
            self._ended[number] = record
            film = self._films.of(number)
            if film is None:
                self._add(number, policy_version)
            elif self._ended.keys() >= film.tiles.keys():
                self._write(film, policy_version)

    def _write(self, film: Film, policy_version: int) -> None:
        records = [self._ended[number] for number in film.tiles]
        states = self._tasks[records[0].task_id]
        tiles, boxes = film.recorder.tiles(), film.recorder.boxes()
        with self._timer.phase("video"):
            video = film.recorder.finish(self._video_dir / video_name(records, states))
        if video is not None:
            self.videos.append(video)
        for number, tile in film.tiles.items():
            self._add(number, policy_version, video, tiles.get(tile), boxes.get(tile))

    def _add(
        self,
        number: int,
        policy_version: int,
        video: Path | None = None,
        tile: int | None = None,
        box: tuple[int, int, int, int] | None = None,
    ) -> None:
        record = self._ended[number]
        self._found[number] = EvaluatedEpisode(
            **{field.name: getattr(record, field.name) for field in fields(record)},
            init_state=record.reset_state_id - self._tasks[record.task_id].start,
            policy_version=policy_version,
            video=video,
            tile=tile,
            box=box,
        )
