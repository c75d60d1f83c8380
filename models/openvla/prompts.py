"""Instructions as the prompt's token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embodied_rl.errors import UserError

BOS, EOS, PAD = 1, 2, 32000
SPACE = 29871
"""The empty word of Llama's vocabulary, with which every prompt ends: training data have it before the actions."""


def prompt_text(instruction: str) -> str:
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


class PromptTokenizer:
    """Tokenises each instruction once.

    Args:
        tokenizer: the checkpoint's, which puts BOS first.
        max_tokens: length that prompts are padded to.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._known: dict[str, Tensor] = {}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """[N,max_tokens] int64: BOS, padding, the rest of the prompt.

        Raises:
            UserError: a prompt is too long.
        """
        return torch.stack([self._row(instruction) for instruction in instructions])

    def ids(self, instruction: str) -> list[int]:
        """Without padding."""
        ids = self._tokenizer.encode(prompt_text(instruction)).ids
        ids = ids if ids[:1] == [BOS] else [BOS, *ids]
        return ids if ids[-1] == SPACE else [*ids, SPACE]

    def _row(self, instruction: str) -> Tensor:
        if instruction not in self._known:
            ids = self.ids(instruction)
            room = self._max_tokens - len(ids)
            if room < 0:
                raise UserError(
                    f"instruction {instruction!r} makes a prompt of {len(ids)} tokens, expected at most "
                    f"{self._max_tokens}; raise model.params.max_prompt_tokens"
                )
            self._known[instruction] = torch.tensor([BOS, *[PAD] * room, *ids[1:]])
        return self._known[instruction]


def trim(prompts: Tensor) -> Tensor:
    """[N,L] without the columns that are padding in all rows."""
    longest = int((prompts != PAD).sum(1).max())
    return torch.cat([prompts[:, :1], prompts[:, prompts.shape[1] - longest + 1 :]], 1)
