"""Rollouts that run ahead of the updates, with a bound on how old their weights may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

H = TypeVar("H")


@dataclass(slots=True, kw_only=True)
class Lookahead(Generic[H]):
    """Starts the rollouts of training steps in their order, each as soon as the bound allows.

    Training step s takes weights that s updates made. A rollout of weights of version v may be for any step up to
    v + ``max_staleness``, so with B samples a step a new sample may be begun while ``finished + running <
    (v + max_staleness + 1) B`` (AReaL, arXiv:2505.24298, eq. 3, without its samples that are thrown away: none is).
    What is trained on follows from the step and the version alone, so a run that resumes has nothing to remember.
    """

    max_staleness: int
    """0: a rollout starts with the newest weights only."""
    first: int
    """Training step of the first rollout."""
    end: int
    """There is no rollout for this training step, nor for later ones."""
    start: Callable[[int], H]
    """Starts a training step's rollout, without waiting for it."""
    _running: deque[H] = field(default_factory=deque, init=False)
    _taken: int = field(default=0, init=False)

    @property
    def next(self) -> int:
        """The training step whose rollout is started next."""
        return self.first + self._taken + len(self._running)

    def begin(self, version: int) -> None:
        """Start every rollout that weights of ``version`` may still serve."""
        while self.next < min(version + self.max_staleness + 1, self.end):
            self._running.append(self.start(self.next))

    def take(self) -> H:
        """The next training step's rollout. Where the bound did not allow to start it yet it is started now: whoever
        calls has the newest weights that it will get."""
        if not self._running:
            self._running.append(self.start(self.next))
        self._taken += 1
        return self._running.popleft()
