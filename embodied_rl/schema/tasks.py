"""The tasks' whole configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import ConfigDict

from embodied_rl.schema.actor import ActorConfig
from embodied_rl.schema.algorithm import AlgorithmConfig
from embodied_rl.schema.data import CollectSection, DataConfig, DemonstrationConfig, RewardConfig
from embodied_rl.schema.env import EnvConfig
from embodied_rl.schema.model import ActionModelConfig, ModelConfig
from embodied_rl.schema.rollout import GenerationConfig, RolloutConfig
from embodied_rl.schema.runner import ClusterConfig, RunnerConfig
from embodied_rl.schema.types import STRICT


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


def groups_per_step(config: EmbodiedConfig) -> int:
    """Groups of envs that a training step is made for."""
    return config.env.train.total_num_envs // config.algorithm.group_size * config.algorithm.rollout_epoch


def chunks_per_rollout(config: EmbodiedConfig) -> int:
    """Chunks in which a rollout's simulator steps are decided."""
    steps = config.env.train.max_steps_per_rollout_epoch or config.env.train.max_episode_steps
    return -(-steps // config.model.num_action_chunks)
