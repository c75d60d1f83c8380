"""``critic``: values from a network of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from embodied_rl.schema.actor import OptimConfig
from embodied_rl.schema.types import PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(Section):
    enable: bool
    """Values come from a network of their own, of the policy's ``model_type`` and with a value head, which lies sharded
    in the actor's ranks and has an optimiser of its own; false: from a value head of the policy."""
    path: str | None
    """The folder of weights that it starts from, as ``model.path``; null: that of ``model.path``, and fresh weights
    where there is none."""
    params: dict[str, Any]
    """Options in which it differs from ``model.params``, such as a smaller ``hidden_size``."""
    hf_overrides: dict[str, Any]
    """Settings of transformers' config that differ from those of ``model.hf_overrides``, which it has, too."""
    revision: str | None
    """As ``model.revision``, of ``path``; null: the newest, or where ``path`` is null ``model.revision``."""
    micro_batch_size: PositiveInt | None
    """Samples per pass of one rank through the critic; null: as ``actor.micro_batch_size`` and
    ``actor.max_tokens_per_micro_batch``."""
    enable_offload: bool
    """Keep what ``offload`` names in host memory but while it values and is trained."""
    offload: list[Literal["weights", "gradients", "optimizer"]]
    """As ``actor.offload``, of the critic."""
    optim: OptimConfig
    """Its optimiser, with the options of ``actor.optim``; rates follow ``actor.lr_sched``."""
