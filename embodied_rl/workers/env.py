"""The env worker: steps simulators and asks the policy what to do."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_rl.contracts import ActionChunk, EnvObs, EpisodeRecord, EvaluatedEpisode, RolloutEnd, RolloutStart, Spaces
from embodied_rl.envs import neighbours, render_device
from embodied_rl.envs.episode_queue import EpisodeQueue
from embodied_rl.envs.open_episodes import OpenEpisode
from embodied_rl.envs.reset_states import (
    after_evaluation,
    eval_reset_states,
    first_lengths,
    task_ranges,
    train_reset_states,
)
from embodied_rl.errors import UserError
from embodied_rl.evaluation.episode_films import EpisodeFilms, Film
from embodied_rl.evaluation.video import MAX_TILES, VideoRecorder, filmed_states
from embodied_rl.evaluation.views import Views
from embodied_rl.models.weights.host import release_memory
from embodied_rl.monitoring.peak_memory import UNKNOWN, Peak, PeakMemory
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.plan import Channels, RunPlan
from embodied_rl.runtime.worker import Abandoned, GivenUp, Worker, WorkerContext
from embodied_rl.schema import EmbodiedConfig, VideoConfig
from embodied_rl.workers.env_stage import Stage, build_stages
from embodied_rl.workers.evaluated import EvaluatedEpisodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What an env worker tells the runner about a rollout."""

    episodes: Sequence[EpisodeRecord]
    seconds: dict[str, float]
    """Phase -> wall seconds."""
    env_steps: int
    """Simulator steps taken."""
    videos: list[Path]
    open_episodes: list[OpenEpisode]
    """With auto-reset: where the envs go on in the next rollout."""
    peak_memory: Peak = UNKNOWN
    """Of the process, in the rollout."""
    views: Views | None = None
    """Of the worker's first rollout, and of its first evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport(EnvReport):
    """What an env worker tells the runner about its share of an evaluation."""

    episodes: Sequence[EvaluatedEpisode]
    image_shapes: Mapping[str, tuple[int, int]]
    """Camera -> (height, width) of the policy's images."""
    tells_success: bool
    """Whether a step of these episodes could say that it succeeded."""


class EnvWorker(Worker):
    """Owns ``stages`` groups of envs; while the policy infers for one, the simulators step another.

    Only with a value head are observations sent after the last chunk of a rollout, to be valued.
    """

    def __init__(self, context: WorkerContext, plan: RunPlan[EmbodiedConfig], channels: Channels) -> None:
        super().__init__(context)
        config = plan.config
        self._config, self._lanes, self._params = config.env, plan.lanes, plan.env_params
        self._eval_config, self._eval_params = config.evaluated, plan.eval_env_params
        self._group_size, self._rollout_epochs = config.algorithm.group_size, config.algorithm.rollout_epoch
        self._chunk, self._needs_values = config.model.num_action_chunks, plan.values_per_chunk > 0 or plan.replays
        self._neighbours = plan.world_size("env") if config.cluster.backend == "serial" else 1
        self._turns, self._answers = Channels.need(channels.turns), Channels.need(channels.answers)
        self._timer = PhaseTimer(ended=context.trace.phase)
        self._peak_memory = PeakMemory("cpu")  # simulators that render on an accelerator hold no tensors there
        self._env_steps = 0
        self._train: list[Stage] = []
        self._eval: list[Stage] = []
        self._reset_states: Callable[[int, int, int], NDArray[np.int64]]
        """(step, rollout epoch, episode) -> the initial states of all training envs."""
        self._task_weights: tuple[tuple[int, float], ...] | None = None
        """(Task, how often it is to be played)."""
        self._evaluated_tasks: dict[int, range] = {}
        """Task -> its initial states."""
        self._to_view: dict[str, list[Views]] = {"train": [], "eval": []}
        """What the rollouts and the evaluations that were not reported yet began with; nothing after the first."""

    def setup(self, *, train: bool) -> Spaces:
        """Build the training envs, or those of evaluation alone, and say what they take and give.

        Raises:
            UserError: evaluations have another env (``eval_env``), and one policy does not fit both.
        """
        render_device.use(self.context.device)
        neighbours.share(self._neighbours)
        if not train:
            spaces = _spaces(self._build_eval())
            self._evaluated_tasks = self._tasks_of(self._eval)
            self._release(self._eval)
            return spaces
        spaces = _spaces(self._build_train())
        if self._eval_config is not self._config and (others := _spaces(self._build_eval())) != spaces:
            raise UserError(
                f"eval_env={self._eval_config.name} takes and gives {_shown(others)}; env={self._config.name}, for "
                f"which the policy is made, {_shown(spaces)}: choose another env, or make its init_params fit"
            )
        self._evaluated_tasks = self._tasks_of(self._eval or self._train)
        self._release(self._train)
        self._release(self._eval)
        return spaces

    def _tasks_of(self, stages: Sequence[Stage]) -> dict[int, range]:
        """Tasks of evaluations -> their initial states."""
        return task_ranges(stages[0].env.sim, self._eval_config.task_ids)

    def _release(self, stages: Sequence[Stage]) -> None:
        """Give back what simulators hold, if the configuration wants that of these."""
        cfg = self._config.train if stages is self._train else self._eval_config.eval
        if not cfg.enable_offload or not stages:
            return
        with self._timer.phase("release"):
            for stage in stages:
                stage.release()
            gc.collect()
            if torch.cuda.is_initialized():  # by a simulator on the GPU
                release_memory(self.context.device)
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # of glibc alone
                trim(0)

    def _acquire(self, stages: Sequence[Stage], *, play: bool = True) -> None:
        """Take it again.

        Args:
            play: as of :meth:`Stage.acquire`.
        """
        astray: list[int] = []
        with self._timer.phase("acquire"):
            for stage in stages:
                astray += stage.acquire(
                    report=lambda done, total: self.context.report_progress("resuming envs", done, total), play=play
                )
        if astray:
            print(
                f"env.train.enable_offload: envs {astray} did not come to the very state that they were in when their "
                "actions were repeated: this simulator does not repeat itself; they go on from where that led",
                flush=True,
            )

    def close(self) -> None:
        for stage in (*self._train, *self._eval):
            if hasattr(stage.env, "sim"):
                stage.env.close()
        self._train, self._eval = [], []
        neighbours.share(1)

    def resume(self, episodes: Sequence[OpenEpisode], *, first_episode: int) -> list[int]:
        """Bring the training envs, with auto-reset, to where a checkpoint found them.

        Args:
            episodes: of all envs of the run, or none: then every env starts its episode number ``first_episode``.

        Returns:
            As :meth:`ChunkedEnv.resume`.
        """
        astray: list[int] = []
        self._acquire(self._train, play=False)
        for stage in self._train:
            own = [episode for episode in episodes if episode.env_id in stage.env_ids]
            with self._timer.phase("reset"):
                if own:
                    astray += stage.env.resume(
                        own,
                        self._episode_start,
                        report_progress=lambda done, total: self.context.report_progress("resuming envs", done, total),
                    )
                else:
                    stage.env.reset(
                        [self._episode_start(env_id, first_episode) for env_id in stage.env_ids],
                        self._episode_start,
                        first_episode=first_episode,
                    )
        return astray

    def count_evaluated(self) -> int:
        """Number of episodes of an evaluation, over all workers."""
        return len(eval_reset_states(self._evaluated_tasks, episodes_per_task=self._eval_config.eval.episodes_per_task))

    async def interact(
        self,
        *,
        step: int,
        first_epoch: int = 0,
        video_dir: Path | None = None,
        task_weights: Mapping[int, float] | None = None,
    ) -> EnvReport:
        """Roll out a training step. One that is given up, since another env worker was lost, leaves nothing behind, and
        its report is empty; as :meth:`evaluate`.

        Args:
            step: decides, with the seed, which initial states the envs start from. With auto-reset they go on where
                they are, and the number of an env's episode decides.
            first_epoch: the number of the first rollout epoch, where the step has had some already.
            video_dir: where videos go, if the config wants any.
            task_weights: how often each task is to be played, with ``env.train.task_sampling=success``.
        """
        self._weigh(task_weights)
        self._peak_memory.begin()
        try:
            report = await self._interact(step, first_epoch, video_dir)
            return replace(report, peak_memory=self._peak_memory.end())
        except GivenUp:
            return self._give_up(self._train)

    def prepare(self, *, step: int, task_weights: Mapping[int, float] | None = None) -> None:
        """Reset the envs for the rollout of training step ``step`` while nobody acts, and look: :meth:`interact` takes
        what is ready if it is what it would do. Not with auto-reset. Arguments as there."""
        self._weigh(task_weights)
        with self._timer.phase("reset_ahead"):
            for stage in self._train:
                self.context.report_progress("resetting", 0, 0)
                queue = self._episodes(stage, step, range(self._rollout_epochs))
                stage.ready = queue, stage.env.reset(queue.first, queue.further)

    def _weigh(self, task_weights: Mapping[int, float] | None) -> None:
        if task_weights is not None:
            self._task_weights = tuple(task_weights.items())

    def _give_up(self, stages: Sequence[Stage]) -> EnvReport:
        for stage in stages:
            stage.env.drain_episodes()
            stage.recorder = stage.env.recorder = None
        return EnvReport(
            episodes=[], seconds=self._timer.drain(), env_steps=self._drain_env_steps(), videos=[], open_episodes=[]
        )

    async def _interact(self, step: int, first_epoch: int, video_dir: Path | None) -> EnvReport:
        self._acquire(self._train)
        videos: list[Path] = []
        epochs = range(first_epoch, first_epoch + self._rollout_epochs)
        # Without auto-reset an env that has ended an episode need not wait for the others' in the same epoch.
        for played in [range(epoch, epoch + 1) for epoch in epochs] if self._config.train.auto_reset else [epochs]:
            videos += await self._play(step, played, video_dir)
        await self._end()
        self._release(self._train)
        return replace(self._report(self._train, videos), views=Views.merged(self._to_view.pop("train", ())))

    async def _play(self, step: int, epochs: range, video_dir: Path | None) -> list[Path]:
        """Roll out some epochs of a training step at a stretch; returns the videos."""
        cfg, videos = self._config.train, list[Path]()
        num_chunks = math.ceil((cfg.max_steps_per_rollout_epoch or cfg.max_episode_steps) / self._chunk)
        films: list[tuple[Stage, Film, Path]] = []
        for stage in self._train:
            stage.group_ids = self._group_ids(stage, epochs)
            stage.queue = None if cfg.auto_reset else self._episodes(stage, step, epochs)
            stage.recorder = None
            if video_dir is not None and cfg.video_cfg.save_video:
                films += self._film_training(stage, epochs, video_dir)
        show = self._reporter(self._train, num_chunks)

        def report(chunks: int) -> None:
            videos.extend(self._finished(films))
            show(chunks)

        views = self._to_view.get("train")
        await self._roll(self._train, num_chunks * len(epochs), report=report, epoch=epochs.start, views=views)
        videos += self._finished(films, all_of_them=True)
        for stage in self._train:
            stage.recorder = None
        return videos

    async def evaluate(self, *, video_dir: Path | None = None) -> EnvReport:
        """Run this worker's share of the evaluation: every task's first initial states, once each.

        Each lane has a fixed run of neighbouring episodes, of which an env that has ended one takes the next, so the
        result depends on the policy and the config alone and a worker meets few scenes.
        """
        try:
            return await self._evaluate(video_dir)
        except GivenUp:
            return self._give_up(self._build_eval())

    async def _evaluate(self, video_dir: Path | None) -> EvalReport:
        stages = self._build_eval()
        self._acquire(stages)
        cfg, tasks = self._eval_config.eval, self._evaluated_tasks
        everything = eval_reset_states(tasks, episodes_per_task=cfg.episodes_per_task)
        shares = np.array_split(everything, len(self._lanes.all()))
        num_chunks, rounds = math.ceil(cfg.max_episode_steps / self._chunk), 1
        at_once: int | None = getattr(stages[0].env.sim, "tasks_at_once", None)
        plays: list[EvaluatedEpisodes] = []
        for stage in stages:
            share, width = shares[self._lanes.index(stage.lane)].tolist(), len(stage.env_ids)
            stage.queue = EpisodeQueue(
                [*share, *[None] * (width - len(share))],
                stage.env_ids,
                tasks=[stage.env.sim.task(state).task_id for state in share],
                at_once=None if at_once is None else max(1, at_once // len(stages)),
            )
            plays.append(EvaluatedEpisodes(stage.queue, tasks, self._timer))
            stage.recorder = None
            if video_dir is not None and cfg.video_cfg.save_video:
                filmed = filmed_states(tasks.values(), cfg.video_cfg.max_videos)
                make = functools.partial(self._recorder, cfg.video_cfg, stage, 1)
                stage.recorder = plays[-1].film(filmed, stage.env_ids, make, video_dir)
            rounds = max(rounds, math.ceil(len(share) / width))
        show = self._reporter(stages, num_chunks)

        def report(chunks: int) -> None:
            for stage, played in zip(stages, plays, strict=True):
                played.ended(stage.env.drain_episodes(), policy_version=stage.policy_version)
            show(chunks)

        await self._roll(stages, num_chunks * rounds, report=report, views=self._to_view.get("eval"))
        await self._end()
        image_shapes = dict(stages[0].env.sim.image_shapes)
        tells_success = any(getattr(stage.env.sim, "tells_success", True) for stage in stages)
        self._release(stages)
        return EvalReport(
            episodes=[episode for played in plays for episode in played.episodes],
            seconds=self._timer.drain(),
            env_steps=self._drain_env_steps(),
            videos=[video for played in plays for video in played.videos],
            open_episodes=[],
            image_shapes=image_shapes,
            tells_success=tells_success,
            views=Views.merged(self._to_view.pop("eval", ())),
        )

    async def _roll(
        self,
        stages: Sequence[Stage],
        num_chunks: int,
        *,
        report: Callable[[int], None],
        epoch: int = 0,
        views: list[Views] | None = None,
    ) -> None:
        """Drive all stages, in turns, until each has done ``num_chunks`` chunks or none of its envs goes on.

        Args:
            report: told how many chunks are done.
            epoch: the first rollout epoch.
            views: takes what episodes begin with, if that is wanted; with auto-reset the first ones.
        """
        for stage in stages:
            stage.env.recorder = stage.recorder
            self.context.report_progress("resetting", 0, 0)  # a sign of life: it may take long
            begins = stage.queue is not None or not stage.env.started
            with self._timer.phase("reset"):
                obs = self._first_obs(stage)
            if views is not None and begins:
                views += _views(obs, stage.env.running)
            stage.running = not stage.env.all_done
            start = RolloutStart(obs=obs, group_ids=stage.group_ids, rollout_epoch=epoch)
            await self._turns.put(start if stage.running else RolloutEnd(final=False), key=stage.lane)
        for chunk_index in range(num_chunks):
            for stage in stages:
                if not stage.running:
                    continue
                chunk = await self._answer(stage)
                recorded, queue = stage.group_ids is not None, stage.queue
                several = stage.group_ids is not None and len(stage.group_ids) > 1
                # Before others take their place.
                playing = queue.playing.clone() if queue is not None and (several or views is not None) else None
                with self._timer.phase("env"):
                    result = stage.env.chunk_step(chunk.actions)
                self._env_steps += int(result.valid.sum())
                if views is not None and queue is not None and playing is not None:
                    views += _views(result.next_obs, (queue.playing != playing).nonzero().flatten().tolist())
                if several:
                    result = replace(result, episodes=playing)
                elif not recorded and result.final_obs is not None:
                    result = replace(result, final_obs=None)
                if chunk_index + 1 == num_chunks or stage.env.all_done:
                    stage.running = False
                    valued = self._needs_values and recorded
                    result = replace(result, last=True, next_obs=result.next_obs if valued else None)
                await self._turns.put(result, key=stage.lane)
            report(chunk_index + 1)
            if not any(stage.running for stage in stages):
                return

    def _first_obs(self, stage: Stage) -> EnvObs:
        ready, stage.ready = stage.ready, None
        if stage.queue is None:
            if stage.env.started:
                return stage.env.current_obs()
            return stage.env.reset([self._episode_start(i, 0) for i in stage.env_ids], self._episode_start)
        if ready is not None and ready[0].states == stage.queue.states and stage.recorder is None:
            stage.queue, obs = ready
            return obs
        return stage.env.reset(stage.queue.first, stage.queue.further)

    def _reporter(self, stages: Sequence[Stage], num_chunks: int) -> Callable[[int], None]:
        """What tells the runner how far a rollout is, given how many chunks of ``num_chunks`` are done: by episodes,
        unless they go on in the next one."""
        if any(stage.queue is None for stage in stages):
            return lambda chunks: self.context.report_progress("rollout", chunks, num_chunks)

        def report(chunks: int) -> None:
            del chunks
            queues = [stage.queue for stage in stages if stage.queue is not None]
            total = sum(map(len, queues))
            ended = sum(queue.begun for queue in queues) - sum(len(stage.env.running) for stage in stages)
            under_way = sum(stage.env.under_way for stage in stages)
            self.context.report_progress("episode", ended, total, (ended + under_way) / max(total, 1))

        return report

    def _episodes(self, stage: Stage, step: int, epochs: range) -> EpisodeQueue:
        """The episodes that a stage plays in a training step's rollout epochs, one after another."""
        states = [self._reset_states(step, epoch, 0) for epoch in epochs]
        return EpisodeQueue([int(of_epoch[i]) for of_epoch in states for i in stage.env_ids], stage.env_ids)

    def _group_ids(self, stage: Stage, epochs: range) -> Tensor:
        """[E,N] int64."""
        num_groups = self._config.train.total_num_envs // self._group_size
        ids = torch.arange(stage.env_ids.start, stage.env_ids.stop) // self._group_size
        return torch.tensor(epochs)[:, None] * num_groups + ids

    def _episode_start(self, env_id: int, number: int) -> int:
        """With auto-reset: the initial state of an env's episode."""
        return int(self._reset_states(0, 0, number)[env_id])

    async def _answer(self, stage: Stage) -> ActionChunk:
        with self._timer.phase("wait"):
            chunk: ActionChunk | Abandoned = await self._answers.get(key=stage.lane)
        if isinstance(chunk, Abandoned):
            raise GivenUp
        if chunk.env_ids.tolist() != list(stage.env_ids):
            raise ValueError(f"got actions for envs {chunk.env_ids.tolist()}, expected them for {list(stage.env_ids)}")
        stage.policy_version = chunk.policy_version
        return chunk

    async def _end(self) -> None:
        """Tell the rollout worker that this worker's lanes have no more turns."""
        for stage in range(self._lanes.stages):
            await self._turns.put(RolloutEnd(final=True), key=(self.context.rank, stage))

    def _build_train(self) -> list[Stage]:
        cfg = self._config.train
        lengths = first_lengths(cfg.total_num_envs, group_size=self._group_size, longest=cfg.max_episode_steps)
        self._train = build_stages(
            self._config,
            self._params,
            cfg,
            lanes=self._lanes,
            rank=self.context.rank,
            chunk=self._chunk,
            auto_reset=cfg.auto_reset,
            first_lengths=lengths if cfg.stagger else None,
        )
        tasks = task_ranges(self._train[0].env.sim, self._config.task_ids)
        tasks = after_evaluation(tasks, skip=cfg.skip_states, key="env.train.skip_states")

        if isinstance(cfg.task_sampling, list):
            if len(cfg.task_sampling) != len(tasks):
                raise UserError(
                    f"env.train.task_sampling: got {len(cfg.task_sampling)} weights, expected one for each of the "
                    f"{len(tasks)} tasks {list(tasks)}"
                )
            self._task_weights = tuple(zip(tasks, cfg.task_sampling, strict=True))

        @functools.lru_cache(maxsize=16)
        def reset_states(
            step: int, epoch: int, episode: int, weights: tuple[tuple[int, float], ...] | None
        ) -> NDArray[np.int64]:
            return train_reset_states(
                tasks,
                num_groups=cfg.total_num_envs // self._group_size,
                group_size=self._group_size,
                seed=self._config.seed,
                fixed=cfg.use_fixed_reset_state_ids,
                step=step,
                rollout_epoch=epoch,
                episode=episode,
                weights=None if weights is None else dict(weights),
            )

        self._reset_states = lambda step, epoch, episode: reset_states(step, epoch, episode, self._task_weights)
        if cfg.auto_reset:
            for stage in self._train:
                stage.next_reset_state = self._episode_start
        return self._train

    def _build_eval(self) -> list[Stage]:
        """Build the envs of evaluations, once: at the first, so that a run without one pays nothing, unless they are
        others than those of training and must be compared with these."""
        if not self._eval:
            self._eval = build_stages(
                self._eval_config,
                self._eval_params,
                self._eval_config.eval,
                lanes=self._lanes,
                rank=self.context.rank,
                chunk=self._chunk,
            )
        return self._eval

    def _finished(self, films: list[tuple[Stage, Film, Path]], *, all_of_them: bool = False) -> list[Path]:
        """Write the films whose episodes have ended, and take them from the list; returns the files."""
        videos: list[Path] = []
        for entry in list(films):
            stage, film, path = entry
            over = stage.queue is not None and stage.queue.over(film.tiles.keys(), stage.env.running)
            if over or all_of_them:
                films.remove(entry)
                with self._timer.phase("video"):
                    video = film.recorder.finish(path)
                videos += [video] if video else []
        return videos

    def _film_training(self, stage: Stage, epochs: range, video_dir: Path) -> list[tuple[Stage, Film, Path]]:
        """Let a stage's envs be filmed in those rollout epochs that the config wants; returns each film and its
        file."""
        cfg, own, films, made = self._config.train.video_cfg, stage.env_ids, [], []
        for place, epoch in enumerate(epochs):
            if cfg.max_videos is None or epoch < cfg.max_videos:
                numbers = range(place * len(own), (place + 1) * len(own))
                film = Film(self._recorder(cfg, stage, self._group_size), dict(zip(numbers, own, strict=True)))
                films.append(film)
                made.append((stage, film, video_dir / f"epoch{epoch}_worker{stage.lane[0]}_stage{stage.lane[1]}.mp4"))
        playing = (lambda env_id: env_id - own.start) if stage.queue is None else stage.queue.played_by
        stage.recorder = EpisodeFilms(films, playing) if films else None
        return made

    def _recorder(
        self, cfg: VideoConfig, stage: Stage, group_size: int, only: Collection[int] | None = None
    ) -> VideoRecorder:
        return VideoRecorder(
            fps=stage.env.sim.control_hz,
            group_size=group_size,
            info_on_video=cfg.info_on_video,
            only=only,
            max_tiles=max(MAX_TILES, len(only or ())),  # what was chosen is filmed
        )

    def _report(self, stages: Sequence[Stage], videos: list[Path]) -> EnvReport:
        episodes = [episode for stage in stages for episode in stage.env.drain_episodes()]
        return EnvReport(
            episodes=episodes,
            seconds=self._timer.drain(),
            env_steps=self._drain_env_steps(),
            videos=videos,
            open_episodes=[e for stage in stages if stage.next_reset_state for e in stage.env.open_episodes()],
        )

    def _drain_env_steps(self) -> int:
        env_steps, self._env_steps = self._env_steps, 0
        return env_steps


def _spaces(stages: Sequence[Stage]) -> Spaces:
    sim = stages[0].env.sim
    return Spaces(
        action_dim=sim.action_dim,
        state_dim=sim.state_dim,
        image_shapes=dict(sim.image_shapes),
        action_choices=getattr(sim, "action_choices", ()),
    )


def _views(obs: EnvObs | None, slots: list[int]) -> list[Views]:
    """What is seen in some of the envs."""
    if obs is None or not obs.images or not slots:
        return []
    return [Views.of({camera: images.numpy()[slots] for camera, images in obs.images.items()})]


def _shown(spaces: Spaces) -> str:
    cameras = [f"{name} {height} x {width}" for name, (height, width) in spaces.image_shapes.items()]
    actions = f"choices of {spaces.action_choices}" if spaces.action_choices else f"actions of {spaces.action_dim}"
    return f"{actions}, states of {spaces.state_dim}, cameras {', '.join(cameras) or 'none'}"
