"""Base of the sections, and values that several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Base of the configuration and of its sections. Unknown keys are refused, and "3" is not 3; a docstring below a
    field is its description."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
"""A count; what is larger is a slip, and would end in a MemoryError or never."""
NonNegativeInt = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Seeds are as wide as a tensor's integers."""
ThreadCount = Annotated[int, Field(ge=1, le=4096)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmptyString = Annotated[str, Field(min_length=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Interval = Annotated[int, Field(ge=-1, le=10**9)]
"""A period in steps; -1 switches it off."""
RewardLevel = Literal["chunk_level", "action_level"]
"""``algorithm.reward_type``: one reward, value and advantage a chunk, or one a step."""
LogprobLevel = Literal["token_level", "action_level", "chunk_level"]
"""``algorithm.logprob_type`` and ``algorithm.entropy_type``: one unit a token [C,A], a step [C] or a chunk []."""
NormLevel = Literal["none", "group", "task", "batch"]
"""The samples that a mean or a deviation is taken over; see ``algorithms.statistics.normalize``."""
RatioLevel = Literal["token", "sequence"]
"""``algorithm.importance_sampling_level``: a ratio a unit, or the geometric mean of a sample's."""
WeightCap = Literal["mask", "truncate"]
"""``algorithm.behav_imp_weight_mode``."""
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""``algorithm.loss_agg_func``; see ``algorithms/units.py``."""
KLType = Literal["k1", "abs", "k2", "k3", "full"]
"""``algorithm.kl_penalty_type``; see ``algorithms.losses.kl_estimate``."""
DType = Literal["float32", "bfloat16", "float16"]
MicroBatchSize = PositiveInt | Literal["auto"]
