"""Rewards that look for the answer in a text, or at its form, without symbolic mathematics. No torch here."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from embodied_rl.errors import UserError

_NUMBER: Final = re.compile(
    # Neither inside a name (x12) nor of a version (1.2.3).
    r"(?:(?<!\w)(?<!\d\.)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+)(?:[eE][-+]?\d+)?"
    # A unit may follow at once (5kg), but no ordinal's end (5th).
    r"(?!(?:st|nd|rd|th)\b)(?=(?:[^\W\d_]+)?(?!\w))"
)
_SPELLINGS: Final = {"\N{MINUS SIGN}": "-", "{,}": ",", "\\,": ",", "\\!": ""}
"""Of minus and of the thousands' comma, for the most part LaTeX's."""
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
        prefix: what the prompt's chat template has begun already, for example ``<think>``.
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
        depth, place = 1, start.end()
        while depth and place < len(text):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if not depth:
            found = text[start.end() : place - 1]
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


def _last_number(text: str) -> Decimal | None:
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent beyond all bounds
        return None
