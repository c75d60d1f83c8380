"""Functions that score a completion. A new one adds one line to :data:`REWARDS`. No torch here.

A reward function is called as ``function(prompt=..., completion=..., answer=..., **params)`` with texts, and returns a
number, or None where it cannot tell: such a completion is *unverified* and left out of the training step, for a wrong
score would teach the wrong thing.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import unknown_key
from embodied_rl.registry import load_function

REWARDS: dict[str, str] = {
    "final_answer": "embodied_rl.data.rewards:final_answer",
    "math_verify": "embodied_rl.data.rewards:math_verify",
}
"""``reward.function`` -> "module:function"."""
GIVEN = ("prompt", "completion", "answer")
"""What every reward function is given."""


class Reward(Protocol):
    """A reward function with its options bound."""

    def __call__(self, *, prompt: str, completion: str, answer: str) -> float | None: ...


def build_reward(function: str, params: Mapping[str, Any]) -> Reward:
    """The function that ``reward.function`` names, with ``reward.params`` bound.

    Raises:
        UserError: no such function, or it does not take these options.
    """
    found = load_function("reward.function", REWARDS, function)
    parameters = inspect.signature(found).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if missing := [] if takes_all else [name for name in GIVEN if name not in parameters]:
        raise UserError(
            f"reward.function: {function} does not take {', '.join(missing)}; expected "
            "function(*, prompt, completion, answer, ...) -> float | None"
        )
    options = [f"reward.params.{name}" for name in parameters if name not in GIVEN]
    if not takes_all and (wrong := [key for key in params if f"reward.params.{key}" not in options]):
        raise ConfigError([unknown_key(f"reward.params.{key}", options) for key in wrong])
    return functools.partial(_checked, functools.partial(found, **params), function)


def _checked(score: Callable[..., Any], name: str, **texts: str) -> float | None:
    value = score(**texts)
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"reward.function={name} returned {value!r}, expected a finite number, or None for unverified")
    return float(value)


def final_answer(*, prompt: str, completion: str, answer: str, separator: str = ";") -> float:
    """1 if the text after the last ``separator`` is the answer, else 0."""
    del prompt
    return float(completion.rsplit(separator, 1)[-1].strip() == answer)


def math_verify(*, prompt: str, completion: str, answer: str, timeout: int = 5) -> float | None:
    """1 if the completion's final expression (boxed, other LaTeX, or the last number) equals ``answer``, else 0.

    None where the comparison raises or takes longer than ``timeout`` seconds, or where ``answer`` itself is no
    expression. Uses the package math-verify, whose alarm needs the main thread.
    """
    del prompt
    # Imported here: it brings sympy, and only this function needs it.
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise UserError("reward.function=math_verify: its time limit is an alarm, which works in the main thread only")
    try:
        expected = parse(_as_latex(answer), parsing_timeout=timeout, raise_on_error=True)
        if not expected:
            return None
        found = parse(completion, parsing_timeout=timeout, raise_on_error=True)
        return float(verify(expected, found, timeout_seconds=timeout, raise_on_error=True))
    except (Exception, TimeoutException):  # the latter is no Exception
        return None


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float) -> float:
    """What a completion's length adds to its score, 0 or less: ``min(-f (len - (max - buffer)) / buffer, 0)``.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13); lengths in tokens.
    """
    if not buffer_length:
        return 0.0
    return min(-factor * (length - (max_length - buffer_length)) / buffer_length, 0.0)


def _as_latex(answer: str) -> str:
    """Answers come as bare LaTeX as often as not, which is only recognised in a math environment."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
