"""``algorithm``: advantages and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from embodied_rl.schema.types import (
    Fraction,
    KLType,
    LogprobLevel,
    LossAggregation,
    NonNegativeFloat,
    NonNegativeInt,
    NormLevel,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RatioLevel,
    RewardLevel,
    Section,
    WeightCap,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Section):
    temperature: PositiveFloat
    """Temperature of the sampled actions in training; the same value scales the recomputed log-probabilities."""
    temperature_eval: NonNegativeFloat
    """Temperature of evaluation; 0 takes the most likely action."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Action tokens are drawn from the most likely that together have this probability, in training and in evaluation;
    1: from all. The recorded log-probabilities are those of the whole distribution, which the update computes too.
    task=math has ``rollout.top_p``."""
    top_k: PositiveInt | None
    """Action tokens are drawn from so many most likely ones, in training and in evaluation; null: from all. Recorded
    log-probabilities are as with ``top_p``, which cuts what this leaves. task=math has ``rollout.top_k``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig(Section):
    """``(x - mean) / (std + eps)``, mean and deviation each of the batch, of the task, of the group, or left out."""

    mean_level: NormLevel
    """task: over the training step's samples of the same task; envs have tasks, prompts have none."""
    std_level: NormLevel
    leave_one_out: bool
    """Subtract the mean of the others."""
    unbiased_std: bool
    """Divide by n - 1."""
    eps: PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControllerConfig(Section):
    type: Literal["fixed", "adaptive"]
    """adaptive: the weight follows the divergence, towards ``target_kl``."""
    target_kl: PositiveFloat
    """adaptive: mean divergence per unit to aim at."""
    horizon: PositiveInt
    """adaptive: sequences over which the weight adapts; fewer is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(Section):
    """The replay buffer, and how much is trained on it (``learner=sac``)."""

    capacity: PositiveInt
    """Chunks that the buffer holds, states on which nobody acts (a rollout's last, an episode's) included; the oldest
    make room."""
    batch_size: PositiveInt
    """Chunks of an optimiser step."""
    update_to_data: PositiveFloat
    """Updates of the critics for each chunk that comes."""
    learning_starts: NonNegativeInt
    """Chunks that come before the first update; none is made up for later."""
    random_chunks: NonNegativeInt
    """Training steps that begin before so many chunks came act at random, uniformly; 0: the policy acts from the
    first."""
    demonstrations: str | None
    """A LeRobot data set's folder, recorded in the env without noise on what was executed (``collect.noise``), that a
    share of each batch is drawn from; null: none."""
    demonstration_share: Fraction
    """The share; 0.5 is RLPD's half and half."""

    def updates_after(self, chunks: int) -> int:
        """Updates that so many chunks of the run are worth."""
        return math.floor(self.update_to_data * max(0, chunks - self.learning_starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SacConfig(Section):
    """Soft actor-critic (``learner=sac``). ``critic.optim`` is the critics' optimiser, ``actor.optim`` the policy's."""

    num_critics: PositiveInt
    """Critics of the ensemble; each has a target network."""
    target_critics: PositiveInt
    """Target networks, drawn anew for each update, whose least value is the target (REDQ, arXiv:2101.05982)."""
    hidden_size: PositiveInt
    """Units of each hidden layer of a critic."""
    num_layers: PositiveInt
    """Hidden layers of a critic."""
    layer_norm: bool
    """Normalise a critic's hidden layers: values of actions that nobody took stay bounded."""
    tau: Annotated[float, Field(gt=0, le=1)]
    """Share of the way that target networks go to the critics with each update (Polyak)."""
    policy_interval: PositiveInt
    """Updates of the critics for each of the policy and of the temperature."""
    policy_q: Literal["min", "mean"]
    """Value of the ensemble that the policy climbs."""
    decision_penalty: NonNegativeFloat
    """Weight of the mean square of the policy's decisions in its loss: what corrects another policy
    (``model_type=residual``) leaves that alone where the critics tell little."""
    initial_temperature: PositiveFloat
    """Weight of the entropy at the start."""
    temperature_lr: PositiveFloat | None
    """Learning rate with which its logarithm follows the entropy; null: it stays."""
    target_entropy: float
    """Entropy to aim at, in nats for each number of a decision; -1 is the paper's -dim(A)."""
    backup_entropy: bool
    """Count the entropy of later actions as reward in the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Section):
    learner: Literal["on_policy", "sac"]
    """on_policy: trains on each step's rollouts, with ``adv_type`` and ``loss_type``; sac: on a replay buffer, with
    critics of its own (``replay``, ``sac``)."""
    adv_type: str
    """Advantage estimator: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline or raw; or one from
    outside: an entry point, ``module:function`` or ``path/to/file.py:function``. gae needs a value head, which the
    model then gets."""
    loss_type: str
    """Policy loss: ppo, decoupled_ppo, aipo or nll (demonstrations); or one from outside."""
    params: dict[str, Any]
    """Hyperparameters of an estimator or loss from outside: the keyword parameters of its function that are no keys of
    this section."""
    group_size: PositiveInt
    """Envs that start from the same initial state and are compared with each other."""
    rollout_epoch: PositiveInt
    """Episodes, or with ``auto_reset`` rollouts, of each env in one training step."""
    update_epoch: PositiveInt
    """Passes over a training step's samples."""
    n_minibatches: PositiveInt | None
    """Optimiser steps per pass. Give this or ``actor.global_batch_size``."""
    reward_type: RewardLevel
    """Unit of a reward, a value and an advantage."""
    logprob_type: LogprobLevel
    """Unit of a probability ratio."""
    entropy_type: LogprobLevel
    """Unit of an entropy."""
    gamma: Fraction
    """Discount per chunk or per action, after ``reward_type``. gae and reinforce_plus_plus. ``learner=sac``: always per
    simulator step."""
    gae_lambda: Fraction
    """gae only."""
    reward_norm: NormConfig
    """Normalisation of the scores, before the estimator. raw and reinforce_plus_plus; the others compare groups."""
    normalize_advantages: bool
    """Apply ``adv_norm``. gae, raw and reinforce_plus_plus; the others compare groups."""
    adv_norm: NormConfig
    """Normalisation of the advantages, over valid units."""
    normalize_returns: bool
    """gae: the value loss measures errors in standard deviations of the step's returns, whatever the rewards' scale."""
    norm_std: bool
    """grpo: divide by the group's standard deviation; false is Dr.GRPO's choice."""
    filter_rewards: bool
    """Mask groups whose mean score is outside the bounds (DAPO's dynamic sampling). An episode's score is 1 where it
    succeeded, else 0, so a group's mean is its success rate; a completion's is what the reward function gave it. Scale,
    shape and penalties of the rewards play no part."""
    rewards_lower_bound: float
    """Included."""
    rewards_upper_bound: float
    """Included."""
    max_resample_rounds: NonNegativeInt
    """Roll out again, up to so many times, until there are as many groups within the bounds as one rollout has."""
    min_filter_prefix_tokens: PositiveInt | None
    """Mask what members of a group begin with in common although their returns differ, from so many tokens on.
    For models with discrete actions. null: off."""
    importance_sampling_level: RatioLevel
    """sequence: all units of a sample share the geometric mean of their ratios (GSPO). A sample is a completion, or a
    chunk of actions."""
    clip_ratio_low: PositiveFraction
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
    """decoupled_ppo: largest weight π_proximal/π_behaviour of a unit. null: there is none."""
    behav_imp_weight_mode: WeightCap
    """decoupled_ppo: units above the cap do not count, or count with the cap as their weight (truncated importance
    sampling)."""
    m2_threshold: PositiveFloat | None
    """decoupled_ppo: units farthest off the policy do not count, until the mean of (log π_behaviour - log π_proximal)²
    is below (M2PO). null: all count."""
    early_stop_imp_ratio: PositiveFloat | None
    """A mini-batch whose mean ratio is above is not trained on and ends the step's update. null: off."""
    positive_nll_coef: PositiveFloat | None
    """Weight of imitating successful episodes, or completions that the reward function gave more than 0. null: off."""
    bc_coef: NonNegativeFloat
    """Weight of imitating demonstrations beside the policy loss, which keeps to them: of the mean of -log π, an action
    each. task=embodied; 0: off."""
    bc_path: str | list[str] | None
    """Their LeRobot data set, recorded in the env with cameras of the same names and sizes; several are taken
    together, frame by frame."""
    bc_batch_size: PositiveInt
    """Frames for each optimiser step, drawn at random; over all actor ranks."""
    loss_agg_func: LossAggregation
    """Aggregation of units into one loss; sequences are completions, or rollouts of an env."""
    loss_scale_factor: PositiveFloat | None
    """seq-mean-token-sum-norm: what a sequence's sum is divided by; null: what the longest possible sequence has."""
    kl_beta: NonNegativeFloat
    """Weight of the divergence from the reference policy, the one that the run started from; 0: there is none."""
    kl_penalty_type: KLType
    """Estimator, a token each; full: exact, for models whose distribution is known."""
    kl_in: Literal["loss", "reward"]
    """Quantity that takes the penalty."""
    kl_ctrl: KLControllerConfig
    value_loss_coef: NonNegativeFloat
    value_clip: PositiveFloat | None
    """Largest change of a value's prediction that is rewarded; null: off."""
    huber_delta: PositiveFloat | None
    """Distance at which the value loss turns from squared to absolute; null: squared."""
    critic_warmup_steps: NonNegativeInt
    """Training steps in which the value head alone is trained, with ``learner=sac`` its critics."""
    entropy_bonus: NonNegativeFloat
    replay: ReplayConfig
    sac: SacConfig
    sampling_params: SamplingConfig
