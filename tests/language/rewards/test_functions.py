"""Scores of completions: exact answers, mathematics, functions of one's own, and what cannot be told."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.rewards.functions import build_reward, overlong_penalty


def length_reward(*, prompt: str, completion: str, answer: str, scale: float = 1.0) -> float:
    return scale * (len(prompt) + 10 * len(completion) + 100 * len(answer))


def not_a_number(**texts: str) -> Any:
    return {"n": float("nan"), "s": "1"}.get(texts["completion"])


def without_answer(*, prompt: str, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("completion", "score"),
    [("7+8+0=15;5+6+1=12;125", 1), ("125", 1), (" 125 ", 1), ("125;", 0), ("5;124", 0), ("", 0), ("1250", 0)],
)
def test_the_final_answer_is_exact(completion: str, score: float) -> None:
    reward = build_reward("final_answer", {})
    assert reward(prompt="57+68=", completion=completion, answer="125") == score


def test_the_separator_is_an_option() -> None:
    reward = build_reward("final_answer", {"separator": "####"})
    assert reward(prompt="", completion="a; b #### 3", answer="3") == 1


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", 1),
        ("1/2", r"the answer is $\frac{2}{4}$.", 1),
        ("125", "57 and 68 make 125", 1),
        ("125", "57 and 68 make 124", 0),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("125", "", 0),
        ("125", "no idea", 0),
        ("(1,2)", r"\boxed{(1,2)}", 1),
    ],
)
def test_mathematics_is_compared_by_value(answer: str, completion: str, score: float) -> None:
    assert build_reward("math_verify", {})(prompt="", completion=completion, answer=answer) == score


def test_what_takes_too_long_is_unverified() -> None:
    reward = build_reward("math_verify", {"timeout": 1})
    assert reward(prompt="", completion=r"$10^{10^{10^{10}}}$", answer="7") is None
    assert reward(prompt="", completion="7", answer="7") == 1, "the alarm is off again"


def test_an_answer_that_is_no_expression_is_unverified() -> None:
    assert build_reward("math_verify", {})(prompt="", completion="5", answer="") is None


def test_outside_the_main_thread_mathematics_is_refused_and_not_scored() -> None:
    """Its alarm would fail, and every completion would count as unverified."""
    caught: list[BaseException] = []

    def score() -> None:
        try:
            build_reward("math_verify", {})(prompt="", completion="5", answer="5")
        except UserError as error:
            caught.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_a_function_of_ones_own() -> None:
    reward = build_reward(f"{__name__}:length_reward", {"scale": 2.0})
    assert reward(prompt="a", completion="bb", answer="ccc") == 2.0 * 321


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        ("final_anser", {}, r"reward.function: got 'final_anser'.*module:function.*Did you mean 'final_answer'\?"),
        (f"{__name__}:lenght_reward", {}, r"has no function 'lenght_reward'. Did you mean 'length_reward'\?"),
        ("no_such_module:score", {}, "'no_such_module' cannot be imported"),
        (f"{__name__}:without_answer", {}, "does not take answer; expected"),
        ("final_answer", {"seperator": "x"}, r"reward.params.seperator: no such key. Did you mean .*separator'\?"),
        ("math_verify", {"limit": 3}, "reward.params.limit: no such key"),
    ],
)
def test_what_cannot_be_is_one_message(function: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ConfigError), match=message):
        build_reward(function, params)


@pytest.mark.parametrize("completion", ["n", "s"])
def test_a_score_is_a_finite_number(completion: str) -> None:
    reward = build_reward(f"{__name__}:not_a_number", {})
    with pytest.raises(UserError, match="expected a finite number, or None for unverified"):
        reward(prompt="", completion=completion, answer="")
    assert reward(prompt="", completion="other", answer="") is None


def test_the_tables_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from embodied_rl.language.rewards.functions import build_reward\n"
        "from embodied_rl.language.datasets.registry import build_dataset\n"
        "build_reward('final_answer', {}); build_dataset('arithmetic', {}).held_out(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0)])
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=100, buffer_length=20, factor=1.0) == penalty
    assert overlong_penalty(length, max_length=100, buffer_length=20, factor=0.5) == penalty / 2
    assert overlong_penalty(length, max_length=100, buffer_length=0, factor=1.0) == 0.0
