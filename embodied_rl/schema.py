"""The config's dataclasses: names, types and documentation. Defaults live in ``config/`` and nowhere else.

No torch here: a typo is answered before anything heavy is imported. Cross-field rules are in ``validation.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)
"""Unknown keys are refused, and "3" is not 3."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[int, Field(ge=-1)]
"""A period in steps; -1 switches it off."""
Level = Literal["token_level", "action_level", "chunk_level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    logger_backends: list[str]
    """Any of console, tensorboard, jsonl, wandb."""
    project_name: str
    """Project in Weights & Biases."""
    wandb: dict[str, Any]
    """Passed to ``wandb.init`` (mode, entity, tags, ...). The API key stays in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    task_type: Literal["embodied"]
    """Which training loop runs; set by ``task=``."""
    experiment_name: str
    """First part of the run directory's name."""
    output_dir: str
    """Run directories are made here: ``<output_dir>/<experiment_name>/<time>``."""
    max_steps: Annotated[int, Field(ge=0)]
    """RL steps: rollout, advantages, update."""
    val_check_interval: Interval
    """Evaluate every so many steps; -1: never during training."""
    val_before_train: bool
    """Evaluate the policy before the first step: the baseline."""
    eval_at_end: bool
    """Evaluate after the last step."""
    save_interval: Interval
    """Save a checkpoint every so many steps and at the end; -1: never."""
    max_keep: PositiveInt | None
    """Keep only the newest checkpoints; null keeps all."""
    resume_dir: str | None
    """A checkpoint, or a run directory (its newest), to go on from; ``auto``: this experiment's newest, if there is."""
    only_eval: bool
    """Evaluate the policy (of ``resume_dir``, if given) and stop."""
    logger: LoggerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    backend: Literal["serial", "process"]
    """serial: all workers in this process, one thread, for a debugger; process: a process each."""
    component_placement: dict[str, str | int]
    """Component -> ranks: ``all``, ``3``, ``0,2,3``, ``0-3``, ``0-3,5``. A rank is an accelerator, or a process slot on
    a machine without one. Components may share a line: ``actor,rollout: 0-3``."""
    num_threads: dict[str, PositiveInt]
    """Component -> CPU threads of torch in each of its workers."""
    stall_timeout: PositiveFloat
    """Seconds without a sign of life from any worker after which the run stops and prints every worker's stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    temperature: PositiveFloat
    """Of the sampled actions in training; the same value scales the recomputed log-probabilities."""
    temperature_eval: NonNegativeFloat
    """Of evaluation; 0 takes the most likely action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    adv_type: str
    """Advantage estimator: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline or raw. gae needs a value
    head, which the model then gets."""
    loss_type: str
    """Policy loss: ppo."""
    group_size: PositiveInt
    """Envs that start from the same initial state and are compared with each other."""
    rollout_epoch: PositiveInt
    """Rollouts of all envs in one training step."""
    update_epoch: PositiveInt
    """Passes over a training step's samples."""
    n_minibatches: PositiveInt | None
    """Optimiser steps per pass. Give this or ``actor.global_batch_size``."""
    reward_type: Literal["chunk_level", "action_level"]
    """What a reward, value and advantage belong to."""
    logprob_type: Level
    """What a probability ratio belongs to."""
    entropy_type: Level
    """What an entropy belongs to."""
    gamma: Fraction
    """Discount per chunk or per action, after ``reward_type``. gae and reinforce_plus_plus."""
    gae_lambda: Fraction
    """gae only."""
    normalize_advantages: bool
    """To zero mean and unit deviation over the whole batch. gae and reinforce_plus_plus; the others compare groups."""
    norm_std: bool
    """grpo: divide by the group's standard deviation; false is Dr.GRPO's choice."""
    filter_rewards: bool
    """Mask groups whose mean score is outside the bounds (DAPO's dynamic sampling)."""
    rewards_lower_bound: float
    rewards_upper_bound: float
    clip_ratio_low: PositiveFloat
    """The ratio is clipped to [1 - low, 1 + high]."""
    clip_ratio_high: PositiveFloat | None
    """null: as low."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None
    """Dual clip for negative advantages; null: off."""
    value_loss_coef: NonNegativeFloat
    value_clip: PositiveFloat | None
    """Largest change of a value's prediction that is rewarded; null: off."""
    huber_delta: PositiveFloat | None
    """Where the value loss turns from squared to absolute; null: squared."""
    entropy_bonus: NonNegativeFloat
    sampling_params: SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    save_video: bool
    info_on_video: bool
    """Label each frame with task, step, reward and success."""
    video_base_dir: str
    """Videos go to ``<video_base_dir>/<run>/``."""
    max_videos: PositiveInt | None
    """Per worker and evaluation (or training step); the rest is not rendered. null: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTrainConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    total_num_envs: PositiveInt
    """Over all workers and stages."""
    max_episode_steps: PositiveInt
    """Horizon: an episode is cut (truncated) here."""
    max_steps_per_rollout_epoch: PositiveInt | None
    """Simulator steps of one rollout; null: ``max_episode_steps``. More needs ``auto_reset``."""
    auto_reset: bool
    """Start the next episode at the end of the chunk in which one ended."""
    ignore_terminations: bool
    """Success does not end an episode, only the horizon does."""
    use_fixed_reset_state_ids: bool
    """Keep the initial states drawn at the start; false draws new ones each rollout. A group always shares one."""
    video_cfg: VideoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEvalConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    total_num_envs: PositiveInt
    max_episode_steps: PositiveInt
    episodes_per_task: PositiveInt
    """Each task's first so many initial states are evaluated, once each."""
    ignore_terminations: bool
    video_cfg: VideoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    """Of the env group, for the run's name."""
    env_type: str
    """Name of the simulator adapter in ``envs/registry.py``, or ``module:Class``."""
    seed: NonNegativeInt
    """Of the choice of initial states."""
    task_ids: list[int] | None
    """Only these tasks of the suite; null: all."""
    use_rel_reward: bool
    """Reward the change of the simulator's reward instead of its level."""
    reward_coef: float
    """Multiplies every reward."""
    init_params: dict[str, Any]
    """The adapter's own options: its ``Params`` dataclass documents them."""
    train: EnvTrainConfig
    eval: EnvEvalConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model_type: str
    """Name in ``models/registry.py``, or ``module:Class``."""
    num_action_chunks: PositiveInt
    """Actions decided at once and executed open-loop."""
    params: dict[str, Any]
    """The model's own options: its ``Params`` dataclass documents them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    pipeline_stage_num: PositiveInt
    """Groups of envs per env worker that take turns: while the policy infers for one, the simulators step another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    lr: PositiveFloat
    value_lr: PositiveFloat | None
    """Of the value head; null: ``lr``."""
    adam_beta1: Fraction
    adam_beta2: Fraction
    adam_eps: PositiveFloat
    weight_decay: NonNegativeFloat
    clip_grad: PositiveFloat | None
    """Largest global norm of the gradient; null: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    reshard_after_forward: bool
    """Free the gathered parameters between forward and backward: less memory, one more all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    seed: NonNegativeInt
    """Of the initial weights, the sampled actions and the mini-batches' order."""
    micro_batch_size: PositiveInt
    """Samples (chunks) per forward and backward pass of one rank; no influence on the result."""
    global_batch_size: PositiveInt | None
    """Samples per optimiser step over all ranks. Give this or ``algorithm.n_minibatches``."""
    optim: OptimConfig
    fsdp_config: FSDPConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run, resolved and checked. Nothing below the command line sees anything but this."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    runner: RunnerConfig
    cluster: ClusterConfig
    algorithm: AlgorithmConfig
    env: EnvConfig
    model: ModelConfig
    rollout: RolloutConfig
    actor: ActorConfig
