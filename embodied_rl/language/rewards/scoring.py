"""Scores of many completions: in this process, or in processes of their own with a time limit. No torch here."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from embodied_rl.language.rewards.functions import REWARD_MODEL, Part, parts_of, weighted
from embodied_rl.language.rewards.pool import ScoringPool
from embodied_rl.schema import RewardConfig

Report = Callable[[int, int], None]
"""Called with (scored, all) now and then."""
_REPORT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is scored."""

    prompt: str
    """As the model reads it."""
    completion: str
    """Without its end token."""
    answer: str
    metadata: str = ""
    """``Problem.metadata``."""


class _Model(Protocol):
    def score(self, items: Sequence[Item], report: Report) -> list[float]: ...


class Scorer:
    """What ``reward`` says of completions. Call :meth:`close` at the end.

    Args:
        config: the config's section.
        device: of a reward model.

    Raises:
        UserError: no such function, or it does not take these options.
    """

    def __init__(self, config: RewardConfig, *, device: str = "cpu") -> None:
        self._pool: ScoringPool | None = None
        parts = parts_of(config.function, config.params)
        self._models = [(part.weight, _model(part, device)) for part in parts if part.function == REWARD_MODEL]
        functions = [part for part in parts if part.function != REWARD_MODEL]
        self._function = weighted(functions)  # in any case: what cannot be is said here, not by a process
        if config.num_processes and functions:
            self._pool = ScoringPool(functions, processes=config.num_processes, timeout=config.timeout)

    def score(self, items: Sequence[Item], report: Report = lambda done, of: None) -> list[float | None]:
        """One number for each; None: unverified.

        Raises:
            UserError: a function returned no number, or ended its process.
            Exception: what a function raised, with its traceback.
        """
        report = _now_and_then(report)
        if self._pool:
            scores = self._pool.score(items, report)
        else:
            scores = []
            for item in items:
                scores.append(
                    self._function(
                        prompt=item.prompt, completion=item.completion, answer=item.answer, metadata=item.metadata
                    )
                )
                report(len(scores), len(items))
        for weight, model in self._models:
            values = model.score(items, report)
            scores = [None if s is None else s + weight * v for s, v in zip(scores, values, strict=True)]
        return scores

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        if self._pool:
            self._pool.close()


def _now_and_then(report: Report) -> Report:
    last = time.monotonic()

    def at_most_each_second(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_S:
            last = time.monotonic()
            report(done, of)

    return at_most_each_second


def _model(part: Part, device: str) -> _Model:
    # Imported here: it brings torch and transformers, and no function needs them.
    module = importlib.import_module("embodied_rl.language.rewards.reward_model")
    return module.RewardModel.build(part.params or {}, device)
