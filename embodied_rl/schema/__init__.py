"""The config's dataclasses: names, types and documentation. Defaults live in ``config/`` and nowhere else.

A module for each section; here they are put together, a class for each task. Rules across fields are in
``tasks/validation.py`` and each task's ``rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied_rl.schema.actor import ActorConfig, FSDPConfig, LRScheduleConfig, MixedPrecisionConfig, OptimConfig
from embodied_rl.schema.algorithm import (
    AlgorithmConfig,
    KLControllerConfig,
    NormConfig,
    ReplayConfig,
    SacConfig,
    SamplingConfig,
)
from embodied_rl.schema.critic import CriticConfig
from embodied_rl.schema.data import (
    AugmentationConfig,
    CollectSection,
    DaggerSection,
    DataConfig,
    DemonstrationConfig,
    PlaySection,
    RewardConfig,
)
from embodied_rl.schema.env import EnvConfig, EnvEvalConfig, EnvTrainConfig, VideoConfig
from embodied_rl.schema.model import ActionModelConfig, LoraSettings, ModelConfig
from embodied_rl.schema.rollout import GenerationConfig, RolloutConfig
from embodied_rl.schema.runner import ClusterConfig, RunnerConfig
from embodied_rl.schema.types import MicroBatchSize, Section

__all__ = [
    "ActionModelConfig",
    "ActorConfig",
    "AlgorithmConfig",
    "AugmentationConfig",
    "ClusterConfig",
    "CollectConfig",
    "CollectSection",
    "Config",
    "CriticConfig",
    "DaggerConfig",
    "DaggerSection",
    "DemonstrationConfig",
    "EmbodiedConfig",
    "EmbodiedSftConfig",
    "EnvConfig",
    "EnvEvalConfig",
    "EnvTrainConfig",
    "FSDPConfig",
    "GenerationConfig",
    "KLControllerConfig",
    "LRScheduleConfig",
    "LoraSettings",
    "MathConfig",
    "MicroBatchSize",
    "MixedPrecisionConfig",
    "ModelConfig",
    "NormConfig",
    "OptimConfig",
    "PlaySection",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunnerConfig",
    "SacConfig",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "VideoConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """A whole run, resolved and checked: what all tasks share. Nothing below the command line sees anything but this.

    A run has the subclass of its task.
    """

    runner: RunnerConfig
    cluster: ClusterConfig
    algorithm: AlgorithmConfig
    model: ModelConfig
    actor: ActorConfig
    critic: CriticConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbodiedConfig(Config):
    """``task=embodied``: a policy that acts in simulators."""

    model: ActionModelConfig
    env: EnvConfig
    eval_env: EnvConfig | None = None
    """Env of evaluations, a choice of the same group (``eval_env=libero_10``); null: that of training.
    Where both have the same ``env_type``, options of ``env.init_params`` that it does not set hold for it, too."""
    rollout: RolloutConfig

    @property
    def evaluated(self) -> EnvConfig:
        """The env of evaluations; its section ``eval`` applies."""
        return self.env if self.eval_env is None else self.eval_env


@dataclass(frozen=True, slots=True, kw_only=True)
class MathConfig(Config):
    """``task=math``: a language model that answers prompts, scored by a function."""

    data: DataConfig
    reward: RewardConfig
    rollout: GenerationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(MathConfig):
    """``task=sft``: a language model that imitates the data's demonstrations, evaluated as in ``task=math``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbodiedSftConfig(EmbodiedConfig):
    """``task=embodied_sft``: a policy that imitates recorded episodes, evaluated as in ``task=embodied``."""

    data: DemonstrationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DaggerConfig(EmbodiedSftConfig):
    """``task=dagger``: a policy that imitates, and is shown the way back from where it leads."""

    dagger: DaggerSection


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig(Config):
    """``task=collect``: an expert or a policy plays, and its episodes become a data set."""

    model: ActionModelConfig
    env: EnvConfig
    collect: CollectSection
