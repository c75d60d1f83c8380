"""A pipeline stage's envs in an env worker, and where its rollout stands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.envs.base import SimEnv, adapter_class
from embodied_rl.envs.chunked import ChunkedEnv, FrameRecorder, NextResetState
from embodied_rl.envs.episode_queue import EpisodeQueue
from embodied_rl.envs.open_episodes import OpenEpisode
from embodied_rl.plan import Lane, Lanes
from embodied_rl.schema import EnvConfig, EnvEvalConfig, EnvTrainConfig


@dataclass(slots=True, kw_only=True)
class Stage:
    """One lane's envs, and where its rollout stands."""

    lane: Lane
    env_ids: range
    env: ChunkedEnv
    build: Callable[[], SimEnv]
    released: bool = False
    """What the simulator holds was given back."""
    kept: Sequence[OpenEpisode] = ()
    """Of a simulator that was closed for that: the episodes that go on."""
    recorder: FrameRecorder | None = None
    queue: EpisodeQueue | None = None
    """The episodes of the rollout; None: with auto-reset."""
    group_ids: Tensor | None = None
    """[E,N] int64, of the rollout's epochs; None: it is not recorded."""
    running: bool = False
    next_reset_state: NextResetState | None = None
    """With auto-reset."""
    policy_version: int = -1
    """Of the last answer."""
    ready: tuple[EpisodeQueue, EnvObs] | None = None
    """The episodes that the envs stand at the beginning of, since :meth:`EnvWorker.prepare`, and what is seen there."""

    def release(self) -> None:
        """Give back what the simulator holds, until :meth:`acquire`."""
        if self.released:
            return
        self.released = True
        if release := getattr(self.env.sim, "release", None):
            release()
            return
        self.kept = self.env.open_episodes() if self.next_reset_state is not None and self.env.started else ()
        self.env.close()
        del self.env.sim

    def acquire(self, *, report: Callable[[int, int], None], play: bool = True) -> list[int]:
        """Go on where :meth:`release` was called.

        Args:
            play: False: the envs are about to be told where to go on.

        Returns:
            As :meth:`ChunkedEnv.resume`.
        """
        if not self.released:
            return []
        self.released, self.env.recorder = False, None
        if hasattr(self.env, "sim"):
            return []
        self.env.sim = self.build()
        kept, self.kept = self.kept, ()
        if not kept or not play:
            return []
        assert self.next_reset_state is not None
        return self.env.resume(kept, self.next_reset_state, report_progress=report)


def build_stages(
    config: EnvConfig,
    params: Any,
    cfg: EnvTrainConfig | EnvEvalConfig,
    *,
    lanes: Lanes,
    rank: int,
    chunk: int,
    auto_reset: bool = False,
    first_lengths: Sequence[int] | None = None,
) -> list[Stage]:
    """The envs of one env worker's lanes.

    Args:
        params: ``config.init_params`` as the adapter's ``Params``.
        cfg: ``config.train`` or ``config.eval``.
        chunk: C, the actions of a chunk.
        first_lengths: by env id, as ``ChunkedEnv`` takes them.
    """
    adapter, stages = adapter_class(config.env_type), []
    for stage in range(lanes.stages):
        lane = (rank, stage)
        env_ids = lanes.env_ids(lane, cfg.total_num_envs)
        build = functools.partial(adapter, len(env_ids), params, config.seed)  # every adapter's signature
        env = ChunkedEnv(
            build(),
            env_ids=env_ids,
            num_action_chunks=chunk,
            max_episode_steps=cfg.max_episode_steps,
            auto_reset=auto_reset,
            ignore_terminations=cfg.ignore_terminations,
            use_rel_reward=config.use_rel_reward,
            reward_coef=config.reward_coef,
            first_lengths=None if first_lengths is None else [first_lengths[i] for i in env_ids],
        )
        stages.append(Stage(lane=lane, env_ids=env_ids, env=env, build=build))
    return stages
