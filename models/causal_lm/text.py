"""Instructions as token ids, without a vocabulary file."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from embodied_rl.errors import UserError

PADDING = 0
"""The id behind the last word."""

_WORD = re.compile(r"[a-z0-9]+")


def hash_words(instructions: Sequence[str], *, num_buckets: int, max_words: int) -> Tensor:
    """[N,max_words] int64: each lower-cased word's CRC-32 in 1 .. num_buckets - 1, then :data:`PADDING`.

    The same in every process and on every machine (Python's own ``hash`` is not).

    Raises:
        ValueError: an instruction without a word, or with more than ``max_words``.
    """
    ids = torch.full((len(instructions), max_words), PADDING, dtype=torch.int64)
    for row, instruction in enumerate(instructions):
        words = _WORD.findall(instruction.lower())
        if not 1 <= len(words) <= max_words:
            raise UserError(
                f"instruction {instruction!r} has {len(words)} words, expected 1 to {max_words}; "
                "for longer ones raise model.params.max_words"
            )
        buckets = [1 + zlib.crc32(word.encode()) % (num_buckets - 1) for word in words]
        ids[row, : len(words)] = torch.tensor(buckets)
    return ids
