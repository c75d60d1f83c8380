"""Data sets of prompts. A new one adds one line to :data:`DATASETS`. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from embodied_rl.errors import ConfigError
from embodied_rl.params import parse_params
from embodied_rl.registry import load_configurable

if TYPE_CHECKING:
    from embodied_rl.language.encoding import PromptEncoder

DATASETS: dict[str, str] = {
    "arithmetic": "embodied_rl.language.datasets.arithmetic:Arithmetic",
    "files": "embodied_rl.language.datasets.files:Files",
    "reasoning_gym": "embodied_rl.language.datasets.reasoning_gym:ReasoningGym",
}
"""``data.dataset`` -> "module:Class"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn of a conversation."""

    role: str
    """system, user, assistant, or what else the tokenizer's chat template knows."""
    content: str

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


Prompt: TypeAlias = str | tuple[Message, ...]
"""Plain text, or a conversation whose next turn is the assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt and what is known of it."""

    prompt: Prompt
    answer: str
    """What the reward function compares with."""
    demonstration: str | None = None
    """A right completion, to imitate; None where there is none."""
    cut: Literal["left", "right"] | None = None
    """Where a prompt of more than ``data.max_prompt_length`` tokens loses some; None: it ends the run."""
    source: str = ""
    """Where the problem comes from: an evaluation counts each source by itself."""
    metadata: str = ""
    """For reward functions that take it."""


def problem_id(problem: Problem) -> str:
    """16 hexadecimal digits that tell problems apart by their prompt and answer."""
    prompt = problem.prompt
    turns = prompt if isinstance(prompt, str) else [[message.role, message.content] for message in prompt]
    return hashlib.sha256(json.dumps([turns, problem.answer]).encode()).hexdigest()[:16]


class PromptDataset:
    """Where prompts come from. Constructed as ``Dataset(params)``, ``params`` being the class's ``Params`` dataclass
    built from the config's ``data.params``, then :meth:`prepare`, then the rest."""

    Params: ClassVar[type]

    @classmethod
    def problems(cls, params: Any, *, imitation: bool) -> Iterator[str]:
        """What cannot be in ``params``, told before anything is read or started: got, expected, what to do.

        Args:
            imitation: ``task=sft``, which needs demonstrations.
        """
        del params, imitation
        yield from ()

    def prepare(self, encoder: PromptEncoder) -> str | None:
        """Called once, by each generation worker, when the tokenizer is there; returns what the user should know."""
        del encoder
        return None

    def draw(self, *, seed: int, step: int, count: int, number: int = 0) -> Sequence[Problem]:
        """A training step's problems: a function of the arguments alone, so that a resumed run goes on as it would
        have.

        Args:
            count: ``data.rollout_batch_size``, the same in all steps.
            number: which of the step's rounds this is. Further rounds give problems that the step has not had, as long
                as there are any.
        """
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
        UserError: no such name, module or class, or one without ``Params``.
    """
    return load_configurable("data.dataset", DATASETS, name)


def dataset_params(name: str, params: Mapping[str, Any], *, imitation: bool = False) -> Any:
    """The data set's ``Params`` from the config's ``data.params``.

    Raises:
        UserError: an unknown data set or parameter, or one of the wrong type or out of range.
        ConfigError: options that cannot be together.
    """
    dataset: Any = dataset_class(name)
    parsed = parse_params(dataset.Params, params, "data.params")
    if problems := list(dataset.problems(parsed, imitation=imitation)):
        raise ConfigError(problems)
    return parsed


def build_dataset(name: str, params: Mapping[str, Any]) -> PromptDataset:
    """Construct a data set; ``params`` is the config's ``data.params``.

    Raises:
        UserError: as :func:`dataset_params`, or data that cannot be read.
    """
    dataset: Any = dataset_class(name)
    return dataset(dataset_params(name, params))
