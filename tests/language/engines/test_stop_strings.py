"""Stop strings: found where the last token completes them, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from embodied_rl.language.engines.base import StopStrings

VOCABULARY = ["a", "b", "\n", "ab", "\n\n\n", "b\n", "c"]


def strings(*stops: str) -> StopStrings:
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(VOCABULARY[i] for i in ids))
    return StopStrings(tokenizer, stops)


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("tokens", "stops", "found", "text"),
    [
        (("a", "b"), ("ab",), "ab", ""),
        (("c", "a", "b\n"), ("ab",), "ab", "c"),  # what follows it in the token goes, too
        (("c", "\n\n\n"), ("\n\n",), "\n\n", "c"),  # the first place in the token
        (("a", "\n", "\n"), ("x", "\n\n"), "\n\n", "a"),
        (("ab", "c"), ("ab",), None, None),  # completed before: another token came since
        (("ab", "c", "ab"), ("ab",), "ab", "abc"),
        (("a", "b"), ("b", "ab"), "b", "a"),  # the first that was named
        (("a",), ("ab",), None, None),
    ],
)
def test_the_last_token_completes_it(
    tokens: tuple[str, ...], stops: tuple[str, ...], found: str | None, text: str | None
) -> None:
    looked = strings(*stops)
    assert looked.completed_by_last(ids(*tokens), 0) == found
    if found is not None:
        assert looked.before(ids(*tokens), found) == text


def test_none_comes_too_early() -> None:
    assert strings("b").completed_by_last(ids("a", "b"), 3) is None
    assert strings("b").completed_by_last(ids("a", "c", "b"), 3) == "b"


def test_a_long_completion_is_not_decoded_anew_for_each_token() -> None:
    lengths: list[int] = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return "".join(VOCABULARY[i] for i in tokens)

    tokenizer: Any = SimpleNamespace(decode=decode)
    assert StopStrings(tokenizer, ["ab"]).completed_by_last(ids(*"a" * 1000, "b"), 0) == "ab"
    assert max(lengths) <= 12


def test_without_strings_there_is_nothing_to_look_for() -> None:
    assert not strings()
    assert strings("a")
