"""The config's dataclasses: names, types and documentation. Defaults live in ``config/`` and nowhere else.

A module for each section; ``tasks`` puts them together. Cross-field rules are in ``validation.py``.
"""

from __future__ import annotations

from embodied_rl.schema.actor import ActorConfig, FSDPConfig, LRScheduleConfig, MixedPrecisionConfig, OptimConfig
from embodied_rl.schema.algorithm import AlgorithmConfig, KLControllerConfig, NormConfig, SamplingConfig
from embodied_rl.schema.data import AugmentationConfig, CollectSection, DataConfig, DemonstrationConfig, RewardConfig
from embodied_rl.schema.env import EnvConfig, EnvEvalConfig, EnvTrainConfig, VideoConfig
from embodied_rl.schema.model import ActionModelConfig, LoraSettings, ModelConfig
from embodied_rl.schema.rollout import GenerationConfig, RolloutConfig
from embodied_rl.schema.runner import ClusterConfig, LoggerConfig, RunnerConfig
from embodied_rl.schema.tasks import (
    CollectConfig,
    Config,
    EmbodiedConfig,
    EmbodiedSftConfig,
    MathConfig,
    SftConfig,
)
from embodied_rl.schema.types import (
    STRICT,
    DType,
    Fraction,
    Interval,
    MicroBatchSize,
    NonEmptyString,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

__all__ = [
    "STRICT",
    "ActionModelConfig",
    "ActorConfig",
    "AlgorithmConfig",
    "AugmentationConfig",
    "ClusterConfig",
    "CollectConfig",
    "CollectSection",
    "Config",
    "DType",
    "DataConfig",
    "DemonstrationConfig",
    "EmbodiedConfig",
    "EmbodiedSftConfig",
    "EnvConfig",
    "EnvEvalConfig",
    "EnvTrainConfig",
    "FSDPConfig",
    "Fraction",
    "GenerationConfig",
    "Interval",
    "KLControllerConfig",
    "LRScheduleConfig",
    "LoggerConfig",
    "LoraSettings",
    "MathConfig",
    "MicroBatchSize",
    "MixedPrecisionConfig",
    "ModelConfig",
    "NonEmptyString",
    "NonNegativeFloat",
    "NonNegativeInt",
    "NormConfig",
    "OptimConfig",
    "PositiveFloat",
    "PositiveInt",
    "RewardConfig",
    "RolloutConfig",
    "RunnerConfig",
    "SamplingConfig",
    "SftConfig",
    "VideoConfig",
]
