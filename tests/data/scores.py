"""Reward functions of tests, by whose scores a completion can be told."""

from __future__ import annotations


def by_text(*, prompt: str, completion: str, answer: str) -> float:
    """A number between 0 and 1 that differs between completions."""
    del prompt, answer
    return (sum(place * ord(character) for place, character in enumerate(completion, 1)) % 97) / 97


def sometimes_unverified(*, prompt: str, completion: str, answer: str) -> float | None:
    """None for a third of the texts."""
    score = by_text(prompt=prompt, completion=completion, answer=answer)
    return None if round(score * 97) % 3 == 0 else score


def never(*, prompt: str, completion: str, answer: str) -> None:
    del prompt, completion, answer
