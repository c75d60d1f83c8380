"""Functions that score a completion. A new one adds one line to :data:`REWARDS`. No torch here.

A reward function is called as ``function(prompt=..., completion=..., answer=..., **params)`` with texts, and returns a
number, or None where it cannot tell: such a completion is *unverified* and left out of the training step, for a wrong
score would teach the wrong thing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import ConfigDict, Field

from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.params import parse_params, unknown_key
from embodied_rl.registry import load_function

REWARDS: dict[str, str] = {
    "final_answer": "embodied_rl.language.rewards.functions:final_answer",
    "format": "embodied_rl.language.rewards.answers:format_reward",
    "last_number": "embodied_rl.language.rewards.answers:last_number",
    "math_verify": "embodied_rl.language.rewards.functions:math_verify",
    "reasoning_gym": "embodied_rl.language.datasets.reasoning_gym:reasoning_gym",
    "single_choice": "embodied_rl.language.rewards.answers:single_choice",
}
"""``reward.function`` -> "module:function"."""
WEIGHTED: Final = "weighted"
REWARD_MODEL: Final = "reward_model"
COMPOSED: Final = (WEIGHTED, REWARD_MODEL)
"""Values of ``reward.function`` that are no function of one completion."""
PASS_OR_FAIL: Final = frozenset({"final_answer", "format", "last_number", "math_verify", "single_choice"})
"""Those of :data:`REWARDS` whose score is 1 or 0."""
GRADED: Final = frozenset({"reasoning_gym"})
"""Those whose score is any number from 0 to 1."""
GIVEN = ("prompt", "completion", "answer")
"""What every reward function is given."""
METADATA = "metadata"
"""Given, too, to those that take it: what the data set knows of the problem, ``Problem.metadata``."""


class Reward(Protocol):
    """A reward function with its options bound."""

    def __call__(self, *, prompt: str, completion: str, answer: str, metadata: str = "") -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the functions of a weighted sum."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    function: str
    """As ``reward.function``."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    params: dict[str, Any] | None = None
    """As ``reward.params``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedParams:
    """``reward.params`` of ``weighted``."""

    functions: Annotated[list[Part], Field(min_length=1)]


def parts_of(function: str, params: Mapping[str, Any]) -> list[Part]:
    """What ``reward.function`` and ``reward.params`` ask for: the parts of ``weighted``, or the one function.

    Raises:
        ConfigError: the parts are not what they should be.
    """
    if function != WEIGHTED:
        return [Part(function=function, params=dict(params))]
    parts: list[Part] = parse_params(WeightedParams, params, "reward.params").functions
    if any(part.function == WEIGHTED for part in parts):
        raise ConfigError(["reward.params.functions: got a weighted sum in a weighted sum; write it as one"])
    return parts


def score_range(parts: Sequence[Part]) -> tuple[float, float] | None:
    """The least and the largest score that the sum of these can give; None where a function's is not known."""
    if any(part.function not in PASS_OR_FAIL | GRADED for part in parts):
        return None
    weights = [part.weight for part in parts]
    # fsum, as bounds are compared with it: weights of 0.7, 0.2 and 0.1 are together 1, not a little less.
    return math.fsum(min(weight, 0.0) for weight in weights), math.fsum(max(weight, 0.0) for weight in weights)


def weighted(parts: Sequence[Part]) -> Reward:
    """The sum of the parts' scores times their weights; None where one of them is None.

    Raises:
        UserError: as :func:`build_reward`.
    """
    rewards = [(part.weight, build_reward(part.function, part.params or {})) for part in parts]

    def score(*, prompt: str, completion: str, answer: str, metadata: str = "") -> float | None:
        total = 0.0
        for weight, reward in rewards:
            part = reward(prompt=prompt, completion=completion, answer=answer, metadata=metadata)
            if part is None:
                return None
            total += weight * part
        return total

    return score


def build_reward(function: str, params: Mapping[str, Any]) -> Reward:
    """The function that ``reward.function`` names, with ``reward.params`` bound.

    Raises:
        UserError: no such function, or it does not take these options.
    """
    if function == WEIGHTED:
        return weighted(parts_of(function, params))
    found = _load(function)
    parameters = inspect.signature(found).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if missing := [] if takes_all else [name for name in GIVEN if name not in parameters]:
        raise UserError(
            f"reward.function: {function} does not take {', '.join(missing)}; expected "
            "function(*, prompt, completion, answer, ...) -> float | None"
        )
    options = [f"reward.params.{name}" for name in parameters if name not in (*GIVEN, METADATA)]
    if not takes_all and (wrong := [key for key in params if f"reward.params.{key}" not in options]):
        raise ConfigError([unknown_key(f"reward.params.{key}", options) for key in wrong])
    return functools.partial(_checked, functools.partial(found, **params), function, METADATA in parameters)


def name_problem(function: str) -> str | None:
    """What is wrong with a name of no function of ours, as far as that is known without importing; None: nothing."""
    path, colon, name = function.rpartition(":")
    if path.endswith(".py"):
        if not name.isidentifier():
            return f"reward.function: got {function!r}, expected path/to/file.py:function"
        if not Path(path).is_file():
            return (
                f"reward.function: got {function!r}, but there is no such file; a relative path starts at {Path.cwd()}"
            )
    elif not colon and function not in COMPOSED:
        known = sorted([*REWARDS, *COMPOSED])
        return (
            f"reward.function: got {function!r}, expected one of {', '.join(known)}, module:function, or "
            f"path/to/file.py:function.{suggestion(function, known)}"
        )
    return None


def _load(function: str) -> Callable[..., Any]:
    if function not in REWARDS and (problem := name_problem(function)):
        raise UserError(problem)
    path, _, name = function.rpartition(":")
    if not path.endswith(".py"):
        return load_function("reward.function", REWARDS, function)
    spec = importlib.util.spec_from_file_location(f"reward_file_{Path(path).stem}", Path(path).resolve())
    assert spec is not None and spec.loader is not None  # a name that ends with .py always has them
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        known = [own for own, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"reward.function: got {function!r}, but the file has no function {name!r}.{suggestion(name, known)}"
        )
    return found


def _checked(
    score: Callable[..., Any], name: str, takes_metadata: bool, *, metadata: str = "", **texts: str
) -> float | None:
    value = score(**texts, metadata=metadata) if takes_metadata else score(**texts)
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
