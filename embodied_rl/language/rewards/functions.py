"""Functions that score a completion. A new one adds one line to :data:`REWARDS`.

A reward function is called as ``function(prompt=..., completion=..., answer=..., **params)`` with texts, and returns a
number, or None where it cannot tell: such a completion is *unverified* and left out of the training step, for a wrong
score would teach the wrong thing. Its options are its further keyword parameters. A class will do, too: its ``Params``
are its options, it is constructed as ``Reward(params)``, and its instances are called.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, Protocol

from pydantic import ConfigDict, Field

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import field_values, keyword_options, parse_params
from embodied_rl.registry import Registry

WEIGHTED: Final = "weighted"
REWARD_MODEL: Final = "reward_model"
COMPOSED: Final = (WEIGHTED, REWARD_MODEL)
"""Values of ``reward.function`` that are no function of one completion."""
REWARDS: Final = Registry(
    "reward.function",
    {
        "final_answer": "embodied_rl.language.rewards.functions:final_answer",
        "format": "embodied_rl.language.rewards.functions:format_reward",
        "last_number": "embodied_rl.language.rewards.functions:last_number",
        "math_verify": "embodied_rl.language.rewards.functions:math_verify",
        "reasoning_gym": "embodied_rl.language.datasets.reasoning_gym:reasoning_gym",
        "single_choice": "embodied_rl.language.rewards.functions:single_choice",
    },
    group="embodied_rl.rewards",
    kind="function",
    needs_params=True,
    also=COMPOSED,
)
"""``reward.function`` -> "module:function"."""
PASS_OR_FAIL: Final = frozenset({"final_answer", "format", "last_number", "math_verify", "single_choice"})
"""Functions of :data:`REWARDS` whose score is 1 or 0."""
GRADED: Final = frozenset({"reasoning_gym"})
"""Functions of :data:`REWARDS` whose score is any number from 0 to 1."""
_GIVEN: Final = ("prompt", "completion", "answer")
"""Arguments of every reward function."""
_METADATA: Final = "metadata"
"""The argument ``Problem.metadata``, for those functions that take it."""

_NUMBER: Final = re.compile(
    # Neither inside a name (x12) nor of a version (1.2.3).
    r"(?:(?<!\w)(?<!\d\.)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+)(?:[eE][-+]?\d+)?"
    # A unit may follow at once (5kg), but no ordinal's end (5th).
    r"(?!(?:st|nd|rd|th)\b)(?=(?:[^\W\d_]+)?(?!\w))"
)
_SPELLINGS: Final = {"\N{MINUS SIGN}": "-", "{,}": ",", "\\,": ",", "\\!": ""}
"""Spellings of minus and of the thousands' comma, most of them LaTeX's."""
_BOXED: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CHOICES: Final = "ABCDEFGHIJ"
# "I hope" and "A dog" begin with words, "I is right" and "A because" with letters.
_PRONOUN: Final = r"I\s+(?!(?:is|or|because|since)\b)[a-z]"
_ARTICLE: Final = r"A\s+(?!(?:is|was|or|and|but|because|since|as|would|must|has|seems|looks|fits)\b)[a-z]"
_MARKED_CHOICE: Final = re.compile(
    # A small letter alone may be the article.
    r"(?i:answer|choice|option)[*_\s]*(?:(?i:is|was|would be|should be|must be|:|=)[*_\s]*)*"
    r"(?i:option|choice)?[*_\s]*"
    rf"(?:[(\[]\s*([A-Ja-j])\s*[)\]]|['\"“‘`]?(?!{_PRONOUN})([A-J])(?![A-Za-z]|['’][a-z]))"
)
_LONE_CHOICE: Final = re.compile(
    rf"(?<![A-Za-z'’])(?<![A-Za-z]\.)(?!{_PRONOUN}|{_ARTICLE})([A-J])(?![A-Za-z]|['’][a-z])"
)
_THINK_ANSWER: Final = r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?answer>).)+</answer>\s*"


class Reward(Protocol):
    """A reward function with its options bound: called with prompt, completion, answer and, if there is, metadata."""

    def __call__(self, **texts: str) -> float | None: ...


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
    """The parts that ``reward.function`` and ``reward.params`` ask for: those of ``weighted``, or the one function.

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

    def score(**texts: str) -> float | None:
        total = 0.0
        for weight, reward in rewards:
            part = reward(**texts)
            if part is None:
                return None
            total += weight * part
        return total

    return score


def build_reward(function: str, params: Mapping[str, Any]) -> Reward:
    """The one function of that name with its options bound.

    Raises:
        UserError: as :func:`bind_reward`.
    """
    bound = bind_reward(function, params)
    found = bound() if isinstance(bound.func, type) else bound
    takes_metadata = _METADATA in inspect.signature(found).parameters

    def score(*, metadata: str = "", **texts: str) -> float | None:
        value = found(**texts, **({_METADATA: metadata} if takes_metadata else {}))
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(
                f"reward.function={function} returned {value!r}, expected a finite number, or None for unverified"
            )
        return float(value)

    return score


def bind_reward(function: str, params: Mapping[str, Any]) -> functools.partial[Any]:
    """A reward function with its options, or the constructor of a reward class with its ``Params``; nothing is called.

    Raises:
        UserError: no such function, or it does not take these options.
    """
    found = REWARDS.load(function)
    is_class = isinstance(found, type)
    parameters = inspect.signature(getattr(found, "__call__") if is_class else found).parameters  # noqa: B004, B009
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if missing := [] if takes_all else [name for name in _GIVEN if name not in parameters]:
        raise UserError(
            f"reward.function: {function} does not take {', '.join(missing)}; expected "
            "function(*, prompt, completion, answer, ...) -> float | None"
        )
    if is_class:
        return functools.partial(found, parse_params(found.Params, params, "reward.params"))
    options = keyword_options(found, (*_GIVEN, _METADATA))
    if options is None:
        return functools.partial(found, **params)
    return functools.partial(found, **field_values(parse_params(options, params, "reward.params")))


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
    """Addend to a completion's score for its length, 0 or less: ``min(-f (len - (max - buffer)) / buffer, 0)``.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13); lengths in tokens.
    """
    if not buffer_length:
        return 0.0
    return min(-factor * (length - (max_length - buffer_length)) / buffer_length, 0.0)


def last_number(
    *, prompt: str, completion: str, answer: str, boxed: bool = True, tolerance: float = 0.0
) -> float | None:
    """1 if the last number of the completion is the answer, else 0.

    Args:
        boxed: where there is a ``\\boxed{...}``, only the last one's content counts.
        tolerance: how far the numbers may be apart, relative to the answer.

    None where the answer itself is no number. Thousands may have commas, as in ``1,234``, and a unit may follow, as in
    ``5kg``; ``x12`` and ``5th`` are no numbers.
    """
    del prompt
    expected = _last_number(answer)
    if expected is None:
        return None
    content = last_boxed(completion) if boxed else None
    found = _last_number(completion if content is None else content)
    if found is None or not tolerance:
        return float(found == expected)
    try:
        return float(abs(found - expected) <= Decimal(tolerance) * abs(expected))
    except ArithmeticError:  # exponents that decimals can hold but not calculate with
        return 0.0


def single_choice(*, prompt: str, completion: str, answer: str) -> float | None:
    """1 if the letter, A to J, that the completion chooses is the answer's, else 0.

    It is the one in the last ``\\boxed{...}``; else after the last "answer", "choice" or "option"; else the last
    capital that stands alone and is no word (as in "I hope", "A dog"). None where the answer is no letter from A to J.
    """
    del prompt
    expected = answer.strip().strip("().").upper()
    if len(expected) != 1 or expected not in _CHOICES:
        return None
    return float(chosen_letter(completion) == expected)


def format_reward(
    *, prompt: str, completion: str, answer: str, pattern: str = _THINK_ANSWER, prefix: str = ""
) -> float:
    """1 if the whole completion matches the regular expression, else 0.

    Args:
        pattern: by default ``<think>...</think><answer>...</answer>``, each once; a dot matches line ends too.
        prefix: the beginning that the prompt's chat template has written already, for example ``<think>``.
    """
    del prompt, answer
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"reward.params.pattern: got {pattern!r}, which is no regular expression: {error}") from error
    return float(expression.fullmatch(prefix + completion) is not None)


def last_boxed(text: str) -> str | None:
    """The content of the last whole ``\\boxed{...}``, whose braces may be nested; None without one."""
    found = None
    for start in _BOXED.finditer(text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found = text[start.end() : end - 1]
    return found


def chosen_letter(text: str) -> str | None:
    """The letter that a text chooses, as in :func:`single_choice`; None where it has none."""
    boxed = last_boxed(text)
    if boxed is not None:
        content = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\b", " ", boxed)
        letters = _LONE_CHOICE.findall(content) or _LONE_CHOICE.findall(content.upper())
    else:
        letters = ["".join(groups) for groups in _MARKED_CHOICE.findall(text)] or _LONE_CHOICE.findall(text)
    return letters[-1].upper() if letters else None


def _as_latex(answer: str) -> str:
    """Answers come as bare LaTeX as often as not, which is only recognised in a math environment."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


def _last_number(text: str) -> Decimal | None:
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent beyond all bounds
        return None
