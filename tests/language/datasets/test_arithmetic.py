"""Synthetic sums: right, reproducible, and held-out ones never in training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.datasets.arithmetic import is_held_out, scratchpad
from embodied_rl.language.datasets.registry import Problem, build_dataset
from embodied_rl.language.rewards.functions import final_answer


def numbers(problem: Problem) -> tuple[int, int]:
    assert isinstance(problem.prompt, str)
    left, right = problem.prompt.removesuffix("=").split("+")
    return int(left), int(right)


def test_the_scratchpad_carries() -> None:
    assert scratchpad("57", "68") == "7+8+0=15;5+6+1=12;125"
    assert scratchpad("03", "04") == "3+4+0=07;0+0+0=00;7"


@given(x=st.integers(0, 999), y=st.integers(0, 999))
def test_the_scratchpads_last_part_is_the_sum(x: int, y: int) -> None:
    text = scratchpad(f"{x:03d}", f"{y:03d}")
    assert final_answer(prompt="", completion=text, answer=str(x + y)) == 1.0
    for part in text.split(";")[:-1]:
        digits, total = part.split("=")
        assert sum(map(int, digits.split("+"))) == int(total)


@given(seed=st.integers(0, 9), step=st.integers(0, 9), digits=st.integers(1, 5))
def test_drawn_and_held_out_pairs_are_disjoint(seed: int, step: int, digits: int) -> None:
    dataset = build_dataset("arithmetic", {"digits": digits})
    drawn = {numbers(problem) for problem in dataset.draw(seed=seed, step=step, count=40)}
    kept = {numbers(problem) for problem in dataset.held_out(5)}
    assert not drawn & kept
    assert all(is_held_out(*pair) for pair in kept)
    assert not any(is_held_out(*pair) for pair in drawn)


def test_a_draw_is_a_function_of_seed_and_step() -> None:
    dataset = build_dataset("arithmetic", {})
    first = dataset.draw(seed=1, step=2, count=8)
    assert build_dataset("arithmetic", {}).draw(seed=1, step=2, count=8) == first
    both = dataset.draw(seed=1, step=2, count=16)
    assert both[:8] == first
    assert both[8:] == dataset.draw(seed=1, step=2, count=8, number=1), "a round goes on where the last ended"
    assert dataset.draw(seed=1, step=3, count=8) != first
    assert dataset.draw(seed=2, step=2, count=8) != first


def test_a_problem_has_its_answer() -> None:
    for problem in build_dataset("arithmetic", {}).draw(seed=0, step=0, count=50):
        assert int(problem.answer) == sum(numbers(problem))
        assert len(problem.prompt) == 6


def test_the_held_out_pairs_are_a_tenth_of_all_and_mixed() -> None:
    dataset = build_dataset("arithmetic", {})
    everything = dataset.held_out(None)
    assert 900 < len(everything) < 1100
    assert len({problem.prompt for problem in everything}) == len(everything)
    assert dataset.held_out(20) == everything[:20]
    last_digits = {problem.answer[-1] for problem in everything[:100]}
    assert last_digits == set("0123456789"), "a rule would hold out one kind of sums"


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.eval_size=5000: \d+ sums of 2 digits are held out"):
        build_dataset("arithmetic", {}).held_out(5000)
    with pytest.raises(UserError, match=r"data.eval_size=null: too many"):
        build_dataset("arithmetic", {"digits": 6}).held_out(None)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"data.dataset: got 'arithmetik', .*Did you mean 'arithmetic'\?"):
        build_dataset("arithmetik", {})
    with pytest.raises(ConfigError, match=r"data.params.digit: no such key. Did you mean 'data.params.digits'\?"):
        build_dataset("arithmetic", {"digit": 2})
