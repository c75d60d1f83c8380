"""``env``: the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from embodied_rl.schema.types import NonNegativeInt, PositiveFloat, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig(Section):
    save_video: bool
    info_on_video: bool
    """Label each frame with task, step, reward and success."""
    video_base_dir: str
    """Videos go to ``<video_base_dir>/<run>/``."""
    max_videos: PositiveInt | None
    """Evaluation: episodes of each task that are filmed, those of its first initial states. Training: rollouts of each
    step. The rest is not rendered. null: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTrainConfig(Section):
    total_num_envs: PositiveInt
    """Over all workers and stages."""
    max_episode_steps: PositiveInt
    """Horizon: an episode is cut (truncated) here."""
    max_steps_per_rollout_epoch: PositiveInt | None
    """Simulator steps of one rollout; null: ``max_episode_steps``. Any other number needs ``auto_reset``."""
    auto_reset: bool
    """Start the next episode at the end of the chunk in which one ended; unfinished ones go on in the next rollout."""
    stagger: bool
    """With ``auto_reset``: cut each group's first episodes at another length, evenly spread up to
    ``max_episode_steps``. Rollouts shorter than episodes of equal length then hold all parts of them, not the same part
    of each."""
    ignore_terminations: bool
    """Success does not end an episode, only the horizon does, or a simulator that cannot go on."""
    use_fixed_reset_state_ids: bool
    """Keep the initial states drawn at the start; false draws new ones each rollout. A group always shares one."""
    task_sampling: Literal["uniform", "success"] | list[PositiveFloat]
    """Share of each task in a step's groups. uniform: equal. success: by p(1 - p), p being the task's success rate in
    the last steps, so that few episodes are spent on what always or never succeeds. A list: a weight for each task, in
    the order of ``task_ids``."""
    skip_states: NonNegativeInt
    """Each task's first so many initial states are left to evaluation; 0: training meets them, too."""
    enable_offload: bool
    """Between rollouts give back what the simulators hold, such as scenes, rendering contexts and an accelerator's
    memory, and take it again for the next one; the result is the same."""
    video_cfg: VideoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEvalConfig(Section):
    total_num_envs: PositiveInt
    max_episode_steps: PositiveInt
    episodes_per_task: PositiveInt
    """Each task's first so many initial states are evaluated, once each."""
    sampled: bool
    """Play them a second time with actions drawn as in training, and report that success, too. Takes as long again."""
    ignore_terminations: bool
    enable_offload: bool
    """Give back what the simulators of evaluations hold after each, so that it does not stay beside that of
    training's."""
    video_cfg: VideoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig(Section):
    name: str
    """Name of the env group, for the run's name."""
    env_type: str
    """Simulator adapter: a name in ``envs/base.py``, of an entry point, ``module:Class`` or
    ``path/to/file.py:Class``."""
    seed: NonNegativeInt
    """Seed of the choice of initial states."""
    task_ids: list[int] | None
    """Only these tasks of the suite; null: all."""
    use_rel_reward: bool
    """Reward the change of the simulator's reward instead of its level."""
    reward_coef: float
    """Multiplies every reward."""
    max_restarts: NonNegativeInt
    """Env workers that may be replaced in a run because they died, failed or hung; 0: the first one ends the run."""
    worker_timeout: PositiveFloat | None
    """Seconds without a sign of life after which an env worker counts as hung; it gives one a chunk. null: never."""
    max_memory_gb: PositiveFloat | None
    """GiB of memory above which an env worker is replaced between rollouts, for simulators that leak; null: never."""
    init_params: dict[str, Any]
    """The adapter's own options: its ``Params`` dataclass documents them."""
    train: EnvTrainConfig
    eval: EnvEvalConfig
