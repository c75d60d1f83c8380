"""A reward for tests in which a fresh model has something to learn."""

from __future__ import annotations


def even_length(*, prompt: str, completion: str, answer: str) -> float:
    del prompt, answer
    return float(len(completion) % 2 == 0)
