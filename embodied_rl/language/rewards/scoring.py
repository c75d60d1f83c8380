"""Scores of many completions: in this process, or in processes of their own with a time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pebble import ProcessExpired, ProcessPool

from embodied_rl.errors import UserError
from embodied_rl.language.rewards.functions import REWARD_MODEL, Part, Reward, parts_of, weighted
from embodied_rl.runtime import signals
from embodied_rl.schema import RewardConfig

if TYPE_CHECKING:
    from embodied_rl.language.rewards.reward_model import RewardModel

Report = Callable[[int, int], None]
"""Called with (scored, all)."""
_START_S: Final = 120.0
"""Time for a process to import the functions and call them once."""
_SHOWN: Final = 200
"""Characters of a text in a message."""
_EXAMPLE: Final = {"prompt": "1+1=", "completion": r"\boxed{2}", "answer": "2", "metadata": ""}
"""Arguments of the first call, which imports and compiles what later ones do not."""


class RewardError(RuntimeError):
    """A reward function raised in its process; the message is its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A completion to score."""

    prompt: str
    """As the model reads it."""
    completion: str
    """Without its end token."""
    answer: str
    metadata: str = ""
    """``Problem.metadata``."""


class Scorer:
    """The scores that the section ``reward`` asks for. Call :meth:`close` at the end.

    Args:
        config: the config's section.
        device: of a reward model.

    Raises:
        UserError: no such function, or it does not take these options, or its process does not get ready.
    """

    def __init__(self, config: RewardConfig, *, device: str = "cpu") -> None:
        parts = parts_of(config.function, config.params)
        functions = [part for part in parts if part.function != REWARD_MODEL]
        self._models: list[tuple[float, RewardModel]] = []
        for part in parts:
            if part.function == REWARD_MODEL:
                # Imported here: it brings torch and transformers, and no function needs them.
                from embodied_rl.language.rewards.reward_model import RewardModel

                self._models.append((part.weight, RewardModel(part.params or {}, device)))
        self._function = weighted(functions)  # in any case: wrong options are refused here, not by a process
        self._pool: _Pool | None = None
        if config.num_processes and functions:
            self._pool = _Pool(functions, config.num_processes, config.timeout)

    def score(self, items: Sequence[Item], report: Report = lambda done, of: None) -> list[float | None]:
        """One number for each item, in their order; None: unverified, or not within the time limit.

        Raises:
            UserError: a function returned no number, or ended its process.
            RewardError: a function raised in its process.
            Exception: raised by a function in this process.
        """
        scores: list[float | None] = []
        if self._pool:
            scores = self._pool.score(items, report)
        else:
            for item in items:
                scores.append(self._function(**asdict(item)))
                report(len(scores), len(items))
        for weight, model in self._models:
            values = model.score(items, report)
            scores = [None if s is None else s + weight * v for s, v in zip(scores, values, strict=True)]
        return scores

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        if self._pool:
            self._pool.close()


class _Pool:
    """Processes that are started once and reused; one that takes longer than ``timeout`` for an item is replaced."""

    def __init__(self, parts: Sequence[Part], processes: int, timeout: float) -> None:
        self._name, self._timeout = " + ".join(part.function for part in parts), timeout
        self._pool = ProcessPool(
            processes,
            initializer=_start_process,
            initargs=(tuple(parts), os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )
        try:
            with signals.blocked_in_children():
                ready = self._pool.schedule(_ready)
            self._result(ready, " at its start", _START_S)
        except TimeoutError as error:
            self.close()
            raise UserError(
                f"reward.function={self._name}: no process got ready within {_START_S:g} s; see whether it ends in "
                "reward.num_processes=0"
            ) from error
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Item], report: Report) -> list[float | None]:
        scores: list[float | None] = [None] * len(items)
        try:
            waiting: dict[Future[Any], int] = {
                self._pool.schedule(_score, kwargs=asdict(item), timeout=self._timeout): index
                for index, item in enumerate(items)
            }
            for done, future in enumerate(as_completed(waiting), 1):
                index = waiting[future]
                with contextlib.suppress(TimeoutError):
                    scores[index] = self._result(future, f" on the completion {items[index].completion[:_SHOWN]!r}")
                report(done, len(items))
        except BaseException:
            self.close()
            raise
        return scores

    def _result(self, future: Future[Any], when: str, timeout: float | None = None) -> float | None:
        try:
            score, problem, trace = future.result(timeout)
        except TimeoutError:
            raise
        except (ProcessExpired, RuntimeError) as error:
            code = getattr(error, "exitcode", None)
            how = f" ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})" if code else ""
            raise UserError(
                f"reward.function={self._name} ended its process{how}{when}; correct the function"
            ) from error
        if problem:
            raise UserError(problem)
        if trace:
            raise RewardError(f"reward.function={self._name} raised{when}:\n{trace}")
        return score

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


_reward: Reward
"""In a scoring process."""


def _start_process(parts: Sequence[Part], parent: int) -> None:
    global _reward
    signals.die_with_parent(parent)
    signals.show_as("reward")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.unblock()
    faulthandler.enable()
    _reward = weighted(parts)
    with contextlib.suppress(Exception):  # it may not like the example
        _reward(**_EXAMPLE)


def _ready() -> tuple[None, None, None]:
    return None, None, None


def _score(**item: str) -> tuple[float | None, str | None, str | None]:
    """The score, or a message for the user, or a traceback: exceptions themselves may not cross a pipe."""
    try:
        return _reward(**item), None, None
    except UserError as error:
        return None, str(error), None
    except BaseException as error:  # an exit() in a function is a failure, too
        return None, None, "".join(traceback.format_exception(error))
