"""Values that several sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
"""Unknown keys are refused, and "3" is not 3; a field's docstring is its description."""

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
