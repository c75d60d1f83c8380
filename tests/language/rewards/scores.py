"""Reward functions of tests, by whose scores a completion can be told."""

from __future__ import annotations

import os
import signal
import time

_CALLS: list[str] = []


def by_text(*, prompt: str, completion: str, answer: str) -> float:
    """A number between 0 and 1 that differs between completions."""
    del prompt, answer
    return (sum(place * ord(character) for place, character in enumerate(completion, 1)) % 97) / 97


def always_one(*, prompt: str, completion: str, answer: str) -> float:
    del prompt, completion, answer
    return 1.0


def sometimes_unverified(*, prompt: str, completion: str, answer: str) -> float | None:
    """None for a third of the texts."""
    score = by_text(prompt=prompt, completion=completion, answer=answer)
    return None if round(score * 97) % 3 == 0 else score


def never(*, prompt: str, completion: str, answer: str) -> None:
    del prompt, completion, answer


def troubled(*, prompt: str, completion: str, answer: str) -> float:
    """The completion as a number, or the trouble that it names."""
    del prompt, answer
    if completion == "hang":
        time.sleep(1000)
    if completion == "raise":
        return 1 / 0
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "leave":
        os._exit(3)
    return completion if completion == "text" else float(completion)  # type: ignore[return-value]


def process(*, prompt: str, completion: str, answer: str) -> float:
    """Which process this is; for "calls", how often it was asked."""
    del prompt, answer
    _CALLS.append(completion)
    return float(len(_CALLS) if completion == "calls" else os.getpid())


def right_or_wrong(*, prompt: str, completion: str, answer: str) -> float:
    """1 or 0, each for half of the texts."""
    return float(by_text(prompt=prompt, completion=completion, answer=answer) > 0.5)


def right_wrong_or_unverified(*, prompt: str, completion: str, answer: str) -> float | None:
    """1, 0 or None, each for a third of the texts."""
    found = round(by_text(prompt=prompt, completion=completion, answer=answer) * 97) % 3
    return None if found == 2 else float(found)
