"""Texts that end a completion, whatever tokens they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS_PER_CHARACTER: Final = 4
"""At the most: a token may be a single byte."""


class StopStrings:
    """Looks for them at the end of completions."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._window = _TOKENS_PER_CHARACTER * (max(map(len, strings), default=0) + 1)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def completed_by_last(self, token_ids: Sequence[int], min_tokens: int) -> str | None:
        """The first of them that the last token completes; none in fewer than ``min_tokens``."""
        if len(token_ids) < min_tokens:
            return None
        tail = list(token_ids[-self._window :])
        text, before = self._decode(tail), self._decode(tail[:-1])
        return next((string for string in self._strings if _place(text, before, string) >= 0), None)

    def before(self, token_ids: Sequence[int], string: str) -> str:
        """The completion's text without the string that its last token completed, and what followed that."""
        ids = list(token_ids)
        text = self._decode(ids)
        return text[: _place(text, self._decode(ids[:-1]), string)]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def _place(text: str, before: str, string: str) -> int:
    """Where the string is in ``text``, of whose characters some were not in ``before``; -1: nowhere."""
    return text.find(string, max(0, len(before) - len(string) + 1))
