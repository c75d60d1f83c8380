"""Data sets of prompts. A new one adds one line to :data:`DATASETS`. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from embodied_rl.params import parse_params
from embodied_rl.registry import load_class

DATASETS: dict[str, str] = {
    "arithmetic": "embodied_rl.data.arithmetic:Arithmetic",
}
"""``data.dataset`` -> "module:Class"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt and what is known of it."""

    prompt: str
    answer: str
    """What the reward function compares with."""
    demonstration: str | None = None
    """A right completion, to imitate; None where there is none."""


class PromptDataset:
    """Where prompts come from. Constructed as ``Dataset(params)``, ``params`` being the class's ``Params`` dataclass
    built from the config's ``data.params``."""

    Params: ClassVar[type]

    def draw(self, *, seed: int, step: int, count: int) -> Sequence[Problem]:
        """A training step's problems: a function of the arguments alone, so that a resumed run goes on as it would
        have."""
        raise NotImplementedError

    def held_out(self, count: int | None) -> Sequence[Problem]:
        """The first ``count`` problems that :meth:`draw` never gives; None: all. Always the same.

        Raises:
            UserError: there are fewer.
        """
        raise NotImplementedError


def dataset_class(name: str) -> type[PromptDataset]:
    """The data set that ``data.dataset`` names.

    Raises:
        UserError: no such name, module or class.
    """
    return load_class("data.dataset", DATASETS, name)


def build_dataset(name: str, params: Mapping[str, Any]) -> PromptDataset:
    """Construct a data set; ``params`` is the config's ``data.params``.

    Raises:
        UserError: an unknown data set or parameter, or one of the wrong type or out of range.
    """
    dataset: Any = dataset_class(name)
    return dataset(parse_params(dataset.Params, params, "data.params"))
