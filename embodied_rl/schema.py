"""The config's dataclasses: names, types and documentation. Defaults live in ``config/`` and nowhere else.

No torch here: a typo is answered before anything heavy is imported. Cross-field rules are in ``validation.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from embodied_rl.algorithms.levels import KLType, LossAggregation, NormLevel, RatioLevel

STRICT = ConfigDict(extra="forbid", strict=True)
"""Unknown keys are refused, and "3" is not 3."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmptyString = Annotated[str, Field(min_length=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[int, Field(ge=-1)]
"""A period in steps; -1 switches it off."""
Level = Literal["token_level", "action_level", "chunk_level"]
DType = Literal["float32", "bfloat16", "float16"]
MicroBatchSize = PositiveInt | Literal["auto"]


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
    task_type: Literal["collect", "embodied", "embodied_sft", "math", "sft"]
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
    """Save a checkpoint every so many steps and at the end; -1: not by steps."""
    save_interval_seconds: PositiveFloat | None
    """Also when so many seconds have passed since the last checkpoint, after the training step; null: not by time."""
    save_async: bool
    """Go on training while a checkpoint is written, from a copy in host memory."""
    save_contents: list[Literal["model", "optimizer"]]
    """What a checkpoint holds. Without the optimiser it is smaller, and no run can go on from it."""
    weight_sync_interval: PositiveInt
    """Training steps between two versions of the weights that rollouts are made with."""
    max_keep: PositiveInt | None
    """Keep only the newest checkpoints; null keeps all."""
    resume_dir: str | None
    """A checkpoint, or a run directory (its newest), to go on from; ``auto``: this experiment's newest, if there is."""
    init_from: str | None
    """A checkpoint, or a run's or an experiment's directory (its newest): start from its weights, at step 0. A run that
    resumes goes on from its own instead."""
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
class NormConfig:
    """``(x - mean) / (std + eps)``, mean and deviation each of the batch, of the group, or left out."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    mean_level: NormLevel
    std_level: NormLevel
    leave_one_out: bool
    """Subtract the mean of the others."""
    unbiased_std: bool
    """Divide by n - 1."""
    eps: PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControllerConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    type: Literal["fixed", "adaptive"]
    """adaptive: the weight follows the divergence, towards ``target_kl``."""
    target_kl: PositiveFloat
    """adaptive: mean divergence per unit to aim at."""
    horizon: PositiveInt
    """adaptive: sequences over which the weight adapts; fewer is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    adv_type: str
    """Advantage estimator: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline or raw. gae needs a value
    head, which the model then gets."""
    loss_type: str
    """Policy loss: ppo, decoupled_ppo, aipo, or nll (demonstrations)."""
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
    reward_norm: NormConfig
    """Of the rollouts' scores, before the estimator. raw and reinforce_plus_plus; the others compare groups."""
    normalize_advantages: bool
    """Apply ``adv_norm``. gae, raw and reinforce_plus_plus; the others compare groups."""
    adv_norm: NormConfig
    """Of the advantages, over valid units."""
    normalize_returns: bool
    """gae: the value loss measures errors in standard deviations of the step's returns, whatever the rewards' scale."""
    norm_std: bool
    """grpo: divide by the group's standard deviation; false is Dr.GRPO's choice."""
    filter_rewards: bool
    """Mask groups whose mean score is outside the bounds (DAPO's dynamic sampling)."""
    rewards_lower_bound: float
    rewards_upper_bound: float
    max_resample_rounds: NonNegativeInt
    """Roll out again, up to so many times, until there are as many groups within the bounds as one rollout has."""
    min_filter_prefix_tokens: PositiveInt | None
    """Mask what members of a group begin with in common although their scores differ, from so many tokens on.
    For models with discrete actions. null: off."""
    importance_sampling_level: RatioLevel
    """sequence: all units of a sample share the geometric mean of their ratios (GSPO). A sample is a completion, or a
    chunk of actions."""
    clip_ratio_low: PositiveFloat
    """The ratio is clipped to [1 - low, 1 + high]."""
    clip_ratio_high: PositiveFloat | None
    """null: as low."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None
    """Dual clip for negative advantages; null: off."""
    aipo_rho: PositiveFloat
    """aipo: largest importance ratio, 2 to 10."""
    prox_logp_method: Literal["recompute", "loglinear", "metrics"]
    """decoupled_ppo: the proximal policy's log-probabilities from a forward pass before the update, or interpolated by
    staleness without one. metrics: recompute, and log how far the interpolation is off."""
    behav_imp_weight_cap: PositiveFloat | None
    """decoupled_ppo: units whose π_proximal/π_behaviour is above do not count. null: all count."""
    m2_threshold: PositiveFloat | None
    """decoupled_ppo: units farthest off the policy do not count, until the mean of (log π_behaviour - log π_proximal)²
    is below (M2PO). null: all count."""
    early_stop_imp_ratio: PositiveFloat | None
    """A mini-batch whose mean ratio is above is not trained on and ends the step's update. null: off."""
    positive_nll_coef: PositiveFloat | None
    """Weight of imitating the samples with a score above 0. null: off."""
    loss_agg_func: LossAggregation
    """How units become one loss; sequences are completions, or rollouts of an env."""
    loss_scale_factor: PositiveFloat | None
    """seq-mean-token-sum-norm: what a sequence's sum is divided by; null: what the longest possible sequence has."""
    kl_beta: NonNegativeFloat
    """Weight of the divergence from the reference policy, the one that the run started from; 0: there is none."""
    kl_penalty_type: KLType
    """Estimator, a token each; full: exact, for models whose distribution is known."""
    kl_in: Literal["loss", "reward"]
    """Where the divergence is penalised."""
    kl_ctrl: KLControllerConfig
    value_loss_coef: NonNegativeFloat
    value_clip: PositiveFloat | None
    """Largest change of a value's prediction that is rewarded; null: off."""
    huber_delta: PositiveFloat | None
    """Where the value loss turns from squared to absolute; null: squared."""
    critic_warmup_steps: NonNegativeInt
    """Training steps in which the value head alone is trained."""
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
class LoraSettings:
    """Low-rank adapters: the base weights are not trained."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    path: str | None
    """A folder of adapters in peft's format, which go on being trained. Rank, alpha, layers and scale are the
    folder's; null: fresh ones."""
    rank: NonNegativeInt
    """0: no adapters, all weights are trained (unless there is a ``path``)."""
    alpha: PositiveInt
    """The adapters' output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Of the adapters' inputs, while gradients are taken."""
    target_modules: list[str] | str
    """Names of linear layers, or the last parts of names; ``all-linear``: all but value head and output head."""
    use_rslora: bool
    """Multiply by alpha / sqrt(rank) instead."""
    init_lora_weights: Literal["default", "gaussian", "pissa", "olora", "orthogonal"]
    """As in peft; with ``default`` the first policy is the base."""
    modules_to_save: list[str]
    """Parts of the model that are trained as a whole beside the adapters; the value head always is."""

    @property
    def used(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0 or self.path is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model_type: str
    """Name in ``models/registry.py``, or ``module:Class``."""
    path: str | None
    """A folder of weights in the model's published layout (for ``causal_lm`` also a name on the hub), or one that
    ``export`` wrote; null: fresh weights."""
    params: dict[str, Any]
    """The model's own options: its ``Params`` dataclass documents them."""
    lora: LoraSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionModelConfig(ModelConfig):
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    num_action_chunks: PositiveInt
    """Actions decided at once and executed open-loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    pipeline_stage_num: PositiveInt
    """Groups of envs per env worker that take turns: while the policy infers for one, the simulators step another."""
    enable_offload: bool
    """Keep the policy in host memory but while it acts, where it shares an accelerator with the actor."""
    max_staleness: NonNegativeInt
    """How many updates older than the newest weights those may be that a training step's rollout was made with. 0: the
    next rollout waits for the update; 1: it runs while the actor updates; more: further ahead."""
    interruptible: bool
    """Take new weights in the middle of a rollout that runs ahead, instead of after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    backend: str
    """What decodes: a name in ``generation/registry.py``, or ``module:Class``."""
    max_new_tokens: PositiveInt
    """Longest completion; one that has not ended by then is cut (truncated)."""
    min_new_tokens: NonNegativeInt
    """A completion cannot end before it has so many tokens, its end token included."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Training samples from the most likely tokens that together have this probability. The recorded
    log-probabilities are those of the whole distribution, which the update computes too."""
    top_k: PositiveInt | None
    """Training samples from so many most likely tokens; null: all."""
    repetition_penalty: PositiveFloat
    """Training divides a token's positive logit by it, and multiplies a negative one, if the token is in the prompt or
    in the completion so far (arXiv:1909.05858); 1: off. The recorded log-probabilities are those without it."""
    stop: list[NonEmptyString]
    """A completion ends with the token that completes one of these texts, in training and evaluation, and is scored
    without it. Beside the model's end tokens."""
    max_batch_size: PositiveInt
    """Completions decoded at once by a worker: bounds memory, no influence on the result."""
    enable_offload: bool
    """Keep the model in host memory but while it generates, where it shares an accelerator with the actor."""
    max_staleness: NonNegativeInt
    """How many updates older than the newest weights those may be that a training step's rollout was made with. 0: the
    next rollout waits for the update; 1: it runs while the actor updates; more: further ahead."""
    interruptible: bool
    """Take new weights in the middle of a rollout that runs ahead, instead of after it."""
    engine_kwargs: dict[str, Any]
    """Arguments of the engine's own, such as vLLM's ``max_model_len`` or ``gpu_memory_utilization``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    """Of the data group, for the run's name."""
    dataset: str
    """Name in ``data/prompts.py``, or ``module:Class``."""
    params: dict[str, Any]
    """The data set's own options: its ``Params`` dataclass documents them."""
    seed: NonNegativeInt
    """Of the choice of prompts."""
    rollout_batch_size: PositiveInt
    """Prompts of a training step; each gets ``algorithm.group_size`` completions."""
    eval_size: PositiveInt | None
    """Held-out prompts of an evaluation, always the same; null: all there are."""
    eval_completions: PositiveInt
    """Completions of each in an evaluation. Several need ``algorithm.sampling_params.temperature_eval`` above 0."""
    max_prompt_length: PositiveInt
    """Tokens; a longer prompt ends the run with a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationConfig:
    """Random changes of a demonstration's images, drawn for each sample anew."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    random_shift: NonNegativeInt
    """Largest shift in pixels, along each axis and for each camera; what comes in repeats the border. 0: off."""
    brightness: Fraction
    """Largest relative change, equal for a sample's cameras, as are the next two. 0: off."""
    contrast: Fraction
    saturation: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    """Of the data group."""
    path: str
    """A LeRobot data set's folder: recorded episodes with the env's cameras, state and actions."""
    cameras: dict[str, str] | None
    """The env's camera -> the data set's feature, such as ``observation.images.image``; null: they have the same
    names."""
    seed: NonNegativeInt
    """Of the frames' order and of the augmentation."""
    batch_size: PositiveInt
    """Frames of a training step, each with the chunk of actions that follows it; a pass over the data set has every
    frame once. ``actor.global_batch_size`` or ``algorithm.n_minibatches`` divides them into optimiser steps."""
    prefetch: NonNegativeInt
    """Training steps whose frames are read ahead while the actor updates."""
    augmentation: AugmentationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSection:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    path: str
    """The LeRobot data set's folder. A collection that was begun there goes on; more demonstrations are added."""
    policy: Literal["expert", "model"]
    """Who plays: the env's scripted expert, or the model with the weights of ``model.path`` or ``runner.init_from``."""
    episodes_per_task: PositiveInt
    """Demonstrations of each task."""
    max_attempts: PositiveInt
    """Episodes played for a demonstration until one succeeds."""
    max_episode_steps: PositiveInt
    """Horizon: an episode without success is a failure here."""
    keep_failures: bool
    """Keep failed attempts, too, marked as such."""
    skip_states: NonNegativeInt
    """Each task's first so many initial states are left to evaluation, which takes the first
    ``env.eval.episodes_per_task``; the demonstrations start from the others, in their order."""
    seed: NonNegativeInt
    """Of the noise and of a model's actions."""
    noise: NonNegativeFloat
    """Standard deviation of the noise on the executed actions. The recorded action is the one without noise, so the
    data show the way back from where it leads (DART, arXiv:1703.09327). 0: off."""
    noise_correlation: Annotated[float, Field(ge=0, lt=1)]
    """Of the noise from one control step to the next: white noise would average out to nothing."""
    expert_noise: bool
    """Let the expert vary its motions by itself, where it does no harm; these actions are recorded as executed."""
    temperature: NonNegativeFloat
    """Of a model's actions; 0 takes the most likely."""
    image_format: Literal["video", "png"]
    """video: H.264, nearly without loss; png: without loss, several times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    function: str
    """Name in ``data/rewards.py``, ``module:function`` or ``path/to/file.py:function``; ``weighted``: a sum of several;
    ``reward_model``: a sequence classifier."""
    params: dict[str, Any]
    """The function's own keyword options."""
    num_processes: NonNegativeInt
    """In which each generation worker scores; 0: in its own."""
    timeout: PositiveFloat
    """Seconds that one completion may take in such a process. Then it is unverified, and the process is replaced."""
    success_threshold: float
    """A completion with at least this score counts as solved."""
    overlong_buffer_length: NonNegativeInt
    """DAPO's soft penalty for long completions in training: it grows over the last so many tokens before
    ``rollout.max_new_tokens``. 0: off."""
    overlong_penalty_factor: NonNegativeFloat
    """What a completion of the longest length loses."""
    mask_truncated: bool
    """Leave completions that were cut by their length out of training."""


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
    skip_nonfinite: bool
    """Skip an optimiser step whose gradient is NaN or infinite and count it in ``actor/nonfinite_steps``; false:
    stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScheduleConfig:
    """Of all learning rates alike, in training steps."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    lr_decay_style: Literal["constant", "linear", "cosine", "wsd"]
    """wsd: stable, then linear."""
    lr_warmup_iters: NonNegativeInt
    """Training steps in which the rate rises to its value."""
    lr_warmup_fraction: Fraction | None
    """Instead: of all training steps."""
    lr_decay_iters: PositiveInt | None
    """The training step in which the decay ends; null: ``runner.max_steps``."""
    min_lr_ratio: Fraction
    """Of the rate, at the decay's end."""
    wsd_decay_fraction: Annotated[float, Field(gt=0, le=1)]
    """wsd: the part of the steps after the warm-up that decays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionConfig:
    """Weights, optimiser state and the mathematics of losses stay as they are, float32 as a rule."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    param_dtype: DType | None
    """Of gathered parameters, and so of forward and backward passes; null: that of the weights. float16 scales the loss
    so that gradients do not underflow."""
    reduce_dtype: DType
    """In which gradients are summed over ranks, and over micro-batches until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    sharding_strategy: Literal["full_shard", "hybrid_shard", "no_shard"]
    """Over which ranks parameters, gradients and optimiser state are split: all of them; those of a group of
    ``fsdp_size``, each group being a replica; none, every rank being a replica."""
    fsdp_size: PositiveInt | None
    """hybrid_shard: ranks of a group, a divisor of the actor's ranks."""
    reshard_after_forward: bool
    """Free the gathered parameters between forward and backward: less memory, one more all-gather."""
    cpu_offload: bool
    """Keep parameters, gradients and optimiser state in host memory, and step the optimiser there. For accelerators."""
    enable_gradient_accumulation: bool
    """Reduce gradients over ranks once an optimiser step instead of after each micro-batch: less communication, but
    until then every rank holds a whole gradient."""
    mixed_precision: MixedPrecisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    seed: NonNegativeInt
    """Of the initial weights, the sampled actions and the mini-batches' order."""
    micro_batch_size: MicroBatchSize
    """Samples (chunks) per forward and backward pass of one rank; no influence on the result. auto: all that an
    optimiser step has, or a half, a quarter and so on where memory runs out; with one rank."""
    max_tokens_per_micro_batch: PositiveInt | None
    """Instead of ``micro_batch_size``, for language: tokens of a rank's forward and backward pass, padding included.
    A longer sample goes alone. null: off."""
    skip_zero_advantages: bool
    """Leave samples out of the update's passes whose loss has no gradient, since all their advantages are 0 and no
    entropy, value or divergence is asked for. The gradient is the same; diagnostics are then of the others."""
    recompute_logprobs: bool
    """Compute the rollout's log-probabilities again before the update, use those, and log how far they are off.
    Where both compute alike it changes nothing but rounding."""
    logprob_micro_batch_size: PositiveInt | None
    """Samples per forward pass where there is no backward: recomputed, proximal and reference log-probabilities.
    null: as ``micro_batch_size``."""
    logprob_gap_warning: PositiveFloat | None
    """Warn when ``actor/logprob_gap``, the mean distance of the rollout's log-probabilities from the recomputed, is
    above. null: never."""
    enable_offload: bool
    """Keep weights and optimiser state in host memory but during the update, where a rollout worker shares the
    accelerator."""
    gradient_checkpointing: bool
    """Keep only the inputs of the model's blocks for the backward pass, which computes the rest again: less memory, one
    more forward pass, the same result."""
    torch_compile: bool
    """Compile the model's blocks with ``torch.compile``; the first passes take minutes."""
    global_batch_size: PositiveInt | None
    """Samples per optimiser step over all ranks. Give this or ``algorithm.n_minibatches``."""
    sync_bucket_mb: PositiveInt
    """MiB of weights that travel to a rollout worker at once: bounds memory."""
    sync_dtype: Literal["bfloat16", "float16"] | None
    """What floating-point weights are rounded to on their way to the rollout workers; null: not at all."""
    verify_weight_sync: bool
    """Compare checksums of the whole policy after every weight sync, and stop where they differ. For debugging."""
    optim: OptimConfig
    lr_sched: LRScheduleConfig
    fsdp_config: FSDPConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run, resolved and checked: what all tasks share. Nothing below the command line sees anything but this.

    A run has one of the subclasses in :data:`TASKS`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    runner: RunnerConfig
    cluster: ClusterConfig
    algorithm: AlgorithmConfig
    model: ModelConfig
    actor: ActorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbodiedConfig(Config):
    """``task=embodied``: a policy that acts in simulators."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: ActionModelConfig
    env: EnvConfig
    rollout: RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MathConfig(Config):
    """``task=math``: a language model that answers prompts, scored by a function."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    data: DataConfig
    reward: RewardConfig
    rollout: GenerationConfig


def groups_per_step(config: EmbodiedConfig) -> int:
    """Groups of envs that a training step is made for."""
    return config.env.train.total_num_envs // config.algorithm.group_size * config.algorithm.rollout_epoch


def chunks_per_rollout(config: EmbodiedConfig) -> int:
    """Chunks in which a rollout's simulator steps are decided."""
    steps = config.env.train.max_steps_per_rollout_epoch or config.env.train.max_episode_steps
    return -(-steps // config.model.num_action_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(MathConfig):
    """``task=sft``: a language model that imitates the data's demonstrations, evaluated as in ``task=math``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbodiedSftConfig(EmbodiedConfig):
    """``task=embodied_sft``: a policy that imitates recorded episodes, evaluated as in ``task=embodied``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    data: DemonstrationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig(Config):
    """``task=collect``: an expert or a policy plays, and its episodes become a data set."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: ActionModelConfig
    env: EnvConfig
    collect: CollectSection


TASKS: Final[dict[str, type[Config]]] = {
    "collect": CollectConfig,
    "embodied": EmbodiedConfig,
    "math": MathConfig,
    "sft": SftConfig,
    "embodied_sft": EmbodiedSftConfig,
}
"""``runner.task_type`` -> the run's configuration."""
