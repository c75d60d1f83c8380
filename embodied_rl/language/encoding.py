"""Prompts to tokens: plain text, or a conversation through the tokenizer's own chat template. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateError

from embodied_rl.errors import UserError
from embodied_rl.language.datasets.registry import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 80
"""Characters of a prompt in a message."""


class PromptEncoder:
    """What a tokenizer makes of prompts.

    Args:
        tokenizer: the model's.
        max_length: ``data.max_prompt_length``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._tokenizer, self.max_length = tokenizer, max_length

    def text(self, prompt: Prompt) -> str:
        """What the model reads, before anything is cut: a conversation with the template's marks, up to where the
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
                f"data.max_prompt_length={limit}; raise that, or leave such prompts out of the data"
            )
        return ids[-limit:] if problem.cut == "left" else ids[:limit]
