"""The tasks' whole configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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

    A run has the subclass of its task.
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
    eval_env: EnvConfig | None = None
    """Env of evaluations, a choice of the same group (``eval_env=libero_10``); null: that of training.
    With the same ``env_type`` it has those of ``env.init_params``, too, that it does not set."""
    rollout: RolloutConfig

    @property
    def evaluated(self) -> EnvConfig:
        """The env of evaluations; its section ``eval`` applies."""
        return self.env if self.eval_env is None else self.eval_env


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
