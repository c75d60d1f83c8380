"""Prompts: the interface of data sets and their names, and their encoding as tokens.

A new data set adds one line to :data:`DATASETS`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

from jinja2 import TemplateError

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import parse_params
from embodied_rl.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATASETS: Final = Registry(
    "data.dataset",
    {
        "arithmetic": "embodied_rl.language.datasets.arithmetic:Arithmetic",
        "files": "embodied_rl.language.datasets.files:Files",
        "reasoning_gym": "embodied_rl.language.datasets.reasoning_gym:ReasoningGym",
    },
    group="embodied_rl.datasets",
    needs_params=True,
)
"""``data.dataset`` -> "module:Class"."""
Overlong: TypeAlias = Literal["error", "filter", "truncate_left", "truncate_right"]
Cut: TypeAlias = Literal["left", "right"]
CUTS: Final[Mapping[str, Cut]] = {"truncate_left": "left", "truncate_right": "right"}
"""``data.params.overlong`` -> where a long prompt loses tokens."""
_SHOWN: Final = 80
"""Characters of a prompt in a message."""


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
    """A prompt and all that is known of it."""

    prompt: Prompt
    answer: str
    """Right answer, for the reward function."""
    demonstration: str | None = None
    """A right completion, to imitate; None where there is none."""
    cut: Cut | None = None
    """Side on which a prompt of more than ``data.max_prompt_length`` tokens loses some; None: it ends the run."""
    source: str = ""
    """Origin of the problem: an evaluation counts each source by itself."""
    metadata: str = ""
    """Data of the problem, for reward functions that take it."""


def problem_id(problem: Problem) -> str:
    """16 hexadecimal digits that tell problems apart by their prompt and answer."""
    prompt = problem.prompt
    turns = prompt if isinstance(prompt, str) else [[message.role, message.content] for message in prompt]
    return hashlib.sha256(json.dumps([turns, problem.answer]).encode()).hexdigest()[:16]


class PromptEncoder:
    """A tokenizer's view of prompts: plain text, or a conversation through its own chat template.

    Args:
        tokenizer: the model's.
        max_length: ``data.max_prompt_length``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._tokenizer, self.max_length = tokenizer, max_length

    def text(self, prompt: Prompt) -> str:
        """The text for the model, before anything is cut: a conversation with the template's marks, up to where the
        assistant's turn begins.

        Raises:
            UserError: a conversation, and the tokenizer has no chat template or its template refuses it.
        """
        if isinstance(prompt, str):
            return prompt
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, so it takes no conversation; use an instruction-tuned "
                "model, or plain prompts with data.params.apply_chat_template=false"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [message.as_dict() for message in prompt], tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise UserError(
                f"the tokenizer's chat template refuses the conversation that ends with "
                f"{prompt[-1].content[:_SHOWN]!r}: {error}; change its roles, or leave data.params.system_prompt out"
            ) from error

    def whole(self, prompt: Prompt) -> tuple[int, ...]:
        """All tokens, of any number.

        Raises:
            UserError: as :meth:`text`, or no token, or characters that the tokenizer does not know.
        """
        text, tokenizer = self.text(prompt), self._tokenizer
        # A template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=isinstance(prompt, str)).input_ids
        if not ids:
            raise UserError(
                f"the prompt {text[:_SHOWN]!r} has 0 tokens, expected 1 to data.max_prompt_length={self.max_length}; "
                "leave such prompts out of the data"
            )
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise UserError(
                f"the prompt {text[:_SHOWN]!r} has characters that the model's tokenizer does not know; use another "
                "model, or with model=tiny_lm set model.params.architecture.characters"
            )
        return tuple(ids)

    def tokens(self, problem: Problem) -> tuple[int, ...]:
        """At most ``max_length`` tokens, cut as the problem says.

        Raises:
            UserError: as :meth:`whole`, or a longer prompt that may not be cut.
        """
        ids, limit = self.whole(problem.prompt), self.max_length
        if len(ids) <= limit:
            return ids
        if problem.cut is None:
            raise UserError(
                f"the prompt {self.text(problem.prompt)[:_SHOWN]!r} has {len(ids)} tokens, expected 1 to "
                f"data.max_prompt_length={limit}; raise that, leave such prompts out of the data, or set "
                "data.params.overlong, where the data set has it, to filter, truncate_left or truncate_right"
            )
        return ids[-limit:] if problem.cut == "left" else ids[:limit]


class PromptDataset:
    """A source of prompts. Constructed as ``Dataset(params)``, ``params`` being the class's ``Params`` dataclass
    built from the config's ``data.params``, then :meth:`prepare`, then the rest."""

    Params: ClassVar[type]

    @classmethod
    def problems(cls, params: Any, *, imitation: bool) -> Iterator[str]:
        """Problems of ``params``, told before anything is read or started: got, expected, what to do.

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


def dataset_params(name: str, params: Mapping[str, Any], *, imitation: bool = False) -> Any:
    """The data set's ``Params`` from the config's ``data.params``.

    Raises:
        UserError: an unknown data set or parameter, or one of the wrong type or out of range.
        ConfigError: options that cannot be together.
    """
    dataset: Any = DATASETS.load(name)
    parsed = parse_params(dataset.Params, params, "data.params")
    if problems := list(dataset.problems(parsed, imitation=imitation)):
        raise ConfigError(problems)
    return parsed


def build_dataset(name: str, params: Mapping[str, Any]) -> PromptDataset:
    """Construct a data set; ``params`` is the config's ``data.params``.

    Raises:
        UserError: as :func:`dataset_params`, or data that cannot be read.
    """
    return DATASETS.load(name)(dataset_params(name, params))


def system_prompt_problems(system_prompt: str | None, *, chat: bool) -> Iterator[str]:
    """Problems of ``data.params.system_prompt``, for data sets that have it."""
    if system_prompt is not None and not chat:
        yield (
            "data.params.system_prompt: only the chat template has room for it; set "
            "data.params.apply_chat_template=true, or leave it out"
        )
