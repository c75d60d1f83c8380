"""Env, rollout and actor workers in this process, driven step by step as the runner would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_rl.checkpoints.store import STATE_FILE
from embodied_rl.contracts import ChunkResult, EpisodeRecord, Trajectory
from embodied_rl.envs.chunked import ChunkedEnv
from embodied_rl.envs.open_episodes import OpenEpisode
from embodied_rl.launch import connect, make_backend
from embodied_rl.models.base import Policy
from embodied_rl.runtime.serial import SerialGroup
from embodied_rl.schema import EmbodiedConfig
from embodied_rl.workers.actor import ActorWorker, UpdateReport
from embodied_rl.workers.env import EnvReport, EnvWorker
from embodied_rl.workers.rollout import RolloutReport, RolloutWorker
from tests.configs import embodied
from tests.fakes import seen_after
from tests.gathered import full_state_dict


@cache
def small(*overrides: str) -> EmbodiedConfig:
    """The dummy env with a small network, 16 envs (8 in evaluation) and horizons of 8 steps."""
    return embodied(
        "cluster=serial",
        "env=dummy",
        "model=mlp",
        "++model.params.hidden_size=16",
        "env.train.total_num_envs=16",
        "env.train.max_episode_steps=8",
        "env.eval.total_num_envs=8",
        "env.eval.max_episode_steps=8",
        "env.eval.episodes_per_task=2",
        *overrides,
    )


def easy(config: EmbodiedConfig, success_radius: float = 0.85) -> EmbodiedConfig:
    """The same with goals so large and steps so wide that episodes end at different times."""
    params = {"success_radius": success_radius, "step_size": 0.5}
    return replace(config, env=replace(config.env, init_params=params))


class Job:
    """Connected workers with version 0 of the weights. Use as a context manager."""

    def __init__(self, config: EmbodiedConfig, initial: Path | None = None) -> None:
        """``initial``: the checkpoint whose weights it starts from."""
        if initial is not None:
            (initial / STATE_FILE).touch()  # only the launcher reads it
            config = replace(config, runner=replace(config.runner, init_from=str(initial)))
        self.config = config
        self._backend = make_backend(config)
        try:
            groups = connect(config, self._backend)
            self.sync(0, groups)
        except BaseException:
            self._backend.shutdown()
            raise
        self._env, self._rollout, self._actor = groups

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.shutdown()

    def sync(self, version: int, groups: Sequence[Any] | None = None) -> None:
        """Give the actor's weights to the rollout workers."""
        _, rollout, actor = groups or (self._env, self._rollout, self._actor)
        loaded = rollout.call(RolloutWorker.load_weights, version)
        actor.call(ActorWorker.publish_weights, version).wait()
        assert set(loaded.wait()) == {version}

    def roll(
        self,
        step: int = 0,
        *,
        first_epoch: int = 0,
        task_weights: Mapping[int, float] | None = None,
        at_random: bool = False,
        video_dir: Path | None = None,
    ) -> tuple[list[Trajectory], list[EnvReport], list[RolloutReport]]:
        """A training rollout: trajectories in the order of epochs and env ids. The actor holds them, too."""
        where = {"step": step, "first_epoch": first_epoch}
        served = self._rollout.call(RolloutWorker.serve, mode="train", at_random=at_random, **where)
        received = self._actor.call(ActorWorker.receive, step=step)
        rolled = self._env.call(EnvWorker.interact, task_weights=task_weights, video_dir=video_dir, **where)
        reports = rolled.wait()
        rollouts = served.wait()
        received.wait()
        trajectories = sorted(self.actor._received, key=lambda t: (t.rollout_epoch, int(t.env_ids[0])))
        return trajectories, reports, rollouts

    def resume(self, episodes: Sequence[OpenEpisode]) -> list[int]:
        """Bring the training envs to where ``episodes`` were left; the envs that came elsewhere."""
        astray: list[list[int]] = self._env.call(EnvWorker.resume, episodes, first_episode=0).wait()
        return [env_id for env_ids in astray for env_id in env_ids]

    def update(self, step: int = 0) -> dict[str, float]:
        """Train on the last rollout; the metrics."""
        [report] = self._actor.call(ActorWorker.update, step=step).wait()
        assert isinstance(report, UpdateReport)
        return report.metrics

    def evaluate(self, step: int = 0) -> list[EpisodeRecord]:
        return [episode for report in self.evaluation(step) for episode in report.episodes]

    def evaluation(self, step: int = 0) -> list[EnvReport]:
        """Each env worker's."""
        served = self._rollout.call(RolloutWorker.serve, mode="eval", step=step)
        reports: list[EnvReport] = self._env.call(EnvWorker.evaluate).wait()
        served.wait()
        return reports

    @property
    def actor(self) -> ActorWorker:
        [worker] = self._workers(self._actor)
        assert isinstance(worker, ActorWorker)
        return worker

    @property
    def policy(self) -> Policy:
        """That of the first rollout worker."""
        worker = self._workers(self._rollout)[0]
        assert isinstance(worker, RolloutWorker)
        return worker.policy

    def weights(self) -> dict[str, Tensor]:
        return full_state_dict(self.actor._policy)

    @staticmethod
    def _workers(group: Any) -> list[Any]:
        assert isinstance(group, SerialGroup)
        return group.workers


class ChunkSpy:
    """Notes what every stage's envs were told to do and what came of it."""

    def __init__(self, monkeypatch: Any) -> None:
        self.results: dict[int, list[ChunkResult]] = {}
        """First env id of the stage -> its chunks."""
        original = ChunkedEnv.chunk_step

        def chunk_step(env: ChunkedEnv, actions: Tensor) -> ChunkResult:
            result = original(env, actions)
            self.results.setdefault(int(seen_after(result).env_ids[0]), []).append(result)
            return result

        monkeypatch.setattr(ChunkedEnv, "chunk_step", chunk_step)
