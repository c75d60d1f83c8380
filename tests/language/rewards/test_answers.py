"""Answers that are found in a text: numbers, letters, and the text's form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.language.rewards.functions import build_reward, chosen_letter, last_boxed


def score(function: str, completion: str, answer: str = "", **params: object) -> float | None:
    return build_reward(function, params)(prompt="", completion=completion, answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("57 and 68 make 125", "125", 1),
        ("125, since 57 + 68", "125", 0),
        ("so \\boxed{125}, as 57 + 68", "125", 1),
        ("first \\boxed{124}, no: \\boxed{125}", "125", 1),
        ("\\boxed{none} 125", "125", 0),
        ("it is 1,234.", "1234", 1),
        ("it is 1234.0", "1,234", 1),
        ("x = -3.5", "-3.5", 1),
        ("5-3", "3", 1),
        ("about 1.25e2", "125", 1),
        ("x12", "12", 0),
        ("", "12", 0),
        ("9007199254740993", "9007199254740992", 0),
        ("1e99999999999999999999", "1", 0),
        ("12", "#### 12", 1),
        ("12", "twelve", None),
        ("it weighs 5kg", "5", 1),
        ("5kg", "5 kg", 1),
        ("12.5cm, not 3", "3", 1),
        ("it takes 90min.", "90", 1),
        ("an area of 5m²", "5", 1),
        ("1e3kg", "1000", 1),
        ("a total of 1,234kg", "1234", 1),
        ("125, at the 5th try", "125", 1),
        ("125 of the 21st century", "125", 1),
        ("it is 7 in python3.11 or v2", "7", 1),
        ("it is 7 in version 1.2.3", "1.2", 1),
        ("0x1F", "0", 0),
        ("2x3", "3", 0),
        ("x = \u22125", "-5", 1),
        ("x = \u22125", "5", 0),
        ("\\boxed{1{,}234}", "1234", 1),
        ("\\boxed{12,\\!345}", "12345", 1),
        ("5\\,\\text{kg}", "5", 1),
        ("Answer:No.5", "5", 1),
        ("well...5", "5", 1),
        ("x=.5", "0.5", 1),
    ],
)
def test_the_last_number(completion: str, answer: str, expected: float | None) -> None:
    assert score("last_number", completion, answer) == expected


def test_the_last_numbers_options() -> None:
    assert score("last_number", "\\boxed{124} 125", "125", boxed=False) == 1
    assert score("last_number", "3.02", "3", tolerance=0.01) == 1
    assert score("last_number", "3.04", "3", tolerance=0.01) == 0
    assert score("last_number", "-2.99", "-3", tolerance=0.01) == 1
    assert score("last_number", "1e9999999999", "3", tolerance=0.01) == 0


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_any_number_is_found_again(number: object) -> None:
    assert score("last_number", f"so 7 it is {number}.", f"{number}") == 1


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{\\frac{1}{2}} and", "\\frac{1}{2}"),
        ("\\boxed{1} \\fbox{2}", "2"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{}", ""),
        ("boxed{1}", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B.", "B"),
        ("Answer: (c)", "C"),
        ("**Answer:** D", "D"),
        ("A or B? I choose option D, not A", "D"),
        ("the answer is A. No, the answer is B", "B"),
        ("\\boxed{\\text{E}} A", "E"),
        ("\\boxed{j}", "J"),
        ("I think A", "A"),
        ("G", "G"),
        ("the answer is a dog", None),
        ("K", None),
        ("no idea", None),
        ("The right one is B. I hope that helps.", "B"),
        ("The answer is B. I hope that helps.", "B"),
        ("It must be (B). I'm sure.", "B"),
        ("It must be (B). I\u2019m sure.", "B"),
        ("It's B. A simple case.", "B"),
        ("Answer: I think B", "B"),
        ("The answer, I believe, is C", "C"),
        ("The answer is: B, not C", "B"),
        ("The answer is **B**, not C", "B"),
        ('The answer is "B", not C', "B"),
        ("the answer should be D, not C", "D"),
        ("I is right", "I"),
        ("The answer is I.", "I"),
        ("Option I", "I"),
        ("A is right", "A"),
        ("Answer: A dog", "A"),
        ("A, because of the U.S.A.", "A"),
        ("A dog", None),
        ("I do not know", None),
        ("\\boxed{B is a cat}", "B"),
        ("\\boxed{(b)}", "B"),
        ("\\boxed{\\textbf{(C) }7}", "C"),
    ],
)
def test_the_letter_that_a_text_chooses(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


SENTENCES = (
    "The right one is {}.",
    "The answer is {}.",
    "Answer: {}",
    "I choose {}.",
    "So it is ({}).",
    "**{}**",
    "{}",
    "\\boxed{{{}}}",
    "Option {} is right.",
)
TAILS = ("", " I hope that helps.", " I'm sure of that.", " A dog would know.", " That was all.", " I would bet on it.")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("sentence", SENTENCES)
@given(letter=st.sampled_from("ABCDEFGHIJ"))
def test_a_letter_is_found_whatever_is_said_of_it(sentence: str, tail: str, letter: str) -> None:
    assert chosen_letter(sentence.format(letter) + tail) == letter


@given(
    st.decimals(min_value=0, max_value=10**6, allow_nan=False, places=2),
    st.sampled_from(["kg", "cm", " kg", "°C", "%", "m²", "min", " apples", "$", ""]),
    st.sampled_from(["", ".", ", I think.", " in all.\n"]),
)
def test_a_number_is_found_with_any_unit(number: object, unit: str, tail: str) -> None:
    assert score("last_number", f"of 17 it is {number}{unit}{tail}", f"{number}") == 1


def test_single_choice() -> None:
    assert score("single_choice", "The answer is B.", "b") == 1
    assert score("single_choice", "The answer is B.", "(C)") == 0
    assert score("single_choice", "", "C") == 0
    assert score("single_choice", "The answer is B.", "K") is None
    assert score("single_choice", "The answer is B.", "") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>\n", 1),
        ("<think></think><answer>5</answer>", 1),
        ("<think>a</think> so <answer>5</answer>", 0),
        ("<think>a</think><answer></answer>", 0),
        ("<think>a</think><answer>5</answer> and more", 0),
        ("<think>a<think>b</think><answer>5</answer>", 0),
        ("<answer>5</answer>", 0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0),
    ],
)
def test_the_default_form_is_thoughts_then_an_answer(text: str, expected: float) -> None:
    assert score("format", text) == expected


def test_a_form_of_ones_own() -> None:
    assert score("format", "abc\n1", pattern=r"[a-c]+.\d") == 1
    assert score("format", "abc\n1!", pattern=r"[a-c]+.\d") == 0
    assert score("format", "a</think><answer>5</answer>", prefix="<think>") == 1
    with pytest.raises(UserError, match=r"reward.params.pattern: got '\(', which is no regular expression"):
        score("format", "", pattern="(")
