"""Scoring in processes: the same scores, a time limit that holds, and failures that are told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.rewards.scoring import Item, RewardError, Scorer
from embodied_rl.schema import RewardConfig
from tests.configs import small_math

pytestmark = pytest.mark.cold_start  # a scorer's processes import little
MODULE = "tests.language.rewards.scores"


def config(function: str, params: dict[str, Any] | None = None, *, processes: int = 0, timeout: float = 20.0) -> Any:
    return RewardConfig(
        function=function,
        params=params or {},
        num_processes=processes,
        timeout=timeout,
        success_threshold=1.0,
        overlong_buffer_length=0,
        overlong_penalty_factor=1.0,
        mask_truncated=False,
    )


def items(*completions: str, answer: str = "7") -> list[Item]:
    return [Item(prompt="p", completion=text, answer=answer) for text in completions]


@pytest.fixture
def scorer(request: pytest.FixtureRequest) -> Iterator[Scorer]:
    others = set(psutil.Process().children())  # of other tests' fixtures
    made = Scorer(config(**request.param))
    yield made
    made.close()
    left = set(psutil.Process().children()) - others
    assert not [child for child in left if "spawn_main" in " ".join(child.cmdline())]


def scored(given: list[Item], **options: Any) -> list[float | None]:
    made = Scorer(config(**options))
    try:
        return made.score(given)
    finally:
        made.close()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize(
    ("function", "params"),
    [
        (f"{MODULE}:sometimes_unverified", {}),
        ("math_verify", {}),
        ("last_number", {"tolerance": 0.5}),
    ],
)
def test_processes_give_the_scores_of_one(function: str, params: dict[str, Any], processes: int) -> None:
    given = items(*(f"it is {number}" for number in range(20)))
    expected = scored(given, function=function, params=params)
    assert len(set(expected)) > 1
    assert scored(given, function=function, params=params, processes=processes) == expected


def test_a_weighted_sum_is_the_sum() -> None:
    parts = [
        {"function": "last_number", "weight": 0.75},
        {"function": "format", "weight": 0.25, "params": {"pattern": "<.*>"}},
        {"function": f"{MODULE}:by_text", "weight": -1.0},
    ]
    [by_text] = scored(items("<7>"), function=f"{MODULE}:by_text")
    assert by_text is not None
    assert by_text > 0
    [whole] = scored(items("<7>"), function="weighted", params={"functions": parts})
    assert whole == pytest.approx(0.75 + 0.25 - by_text)
    given = items("<7>", "7", "<8>", "8")
    found = scored(given, function="weighted", params={"functions": parts[:2]}, processes=1)
    assert found == [1.0, 0.75, 0.25, 0.0]


def test_an_unverified_part_makes_the_sum_unverified() -> None:
    parts = [{"function": "format"}, {"function": f"{MODULE}:never"}]
    assert scored(items("7"), function="weighted", params={"functions": parts}) == [None]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "reward.params.functions: missing"),
        ({"functions": []}, "reward.params.functions: got []"),
        ({"functions": [{"function": "weighted"}]}, "a weighted sum in a weighted sum"),
        ({"functions": [{"function": "last_numbr"}]}, "Did you mean 'last_number'?"),
        ({"functions": [{"function": "format", "weigth": 1.0}]}, "reward.params.functions.0.weigth: no such key"),
        ({"functions": [{"function": "format", "params": {"patern": "x"}}]}, "Did you mean 'reward.params.pattern'?"),
    ],
)
def test_sums_that_cannot_be_are_one_message(params: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ConfigError)) as refused:
        Scorer(config("weighted", params))
    assert message in str(refused.value)


@pytest.mark.parametrize("scorer", [{"function": f"{MODULE}:troubled", "processes": 2, "timeout": 0.5}], indirect=True)
def test_a_stuck_process_is_replaced_and_nothing_waits_for_it(scorer: Scorer) -> None:
    assert scorer.score(items("1", "2")) == [1.0, 2.0]
    start = time.monotonic()
    found = scorer.score(items("1", "hang", "2", "3", "hang", "4"))
    assert found == [1.0, None, 2.0, 3.0, None, 4.0]
    assert time.monotonic() - start < 15
    assert scorer.score(items("5", "6", "7")) == [5.0, 6.0, 7.0], "the pool is whole again"


@pytest.mark.parametrize("scorer", [{"function": f"{MODULE}:process", "processes": 1}], indirect=True)
def test_processes_are_warm_and_reused(scorer: Scorer) -> None:
    first = scorer.score(items("a", "b"))
    assert len(set(first)) == 1
    assert first[0] != float(os.getpid())
    assert scorer.score(items("c")) == first[:1]
    [calls] = scorer.score(items("calls"))
    assert calls == 5, "the first call was the pool's own"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_that_raises_is_told_with_its_traceback(processes: int) -> None:
    with pytest.raises((RewardError, ZeroDivisionError)) as raised:
        scored(items("1", "raise"), function=f"{MODULE}:troubled", processes=processes)
    if processes:
        text = str(raised.value)
        assert "ZeroDivisionError" in text
        assert "scores.py" in text
        assert "on the completion 'raise'" in text


@pytest.mark.parametrize(("completion", "how"), [("crash", "SIGSEGV"), ("leave", "exit status 3")])
def test_a_function_that_ends_its_process_is_told(completion: str, how: str) -> None:
    with pytest.raises(UserError, match=rf"ended its process \({how}\) on the completion '{completion}'; correct"):
        scored(items("1", completion), function=f"{MODULE}:troubled", processes=1)


def test_no_number_is_one_message_from_a_process_too() -> None:
    with pytest.raises(UserError, match=r"returned 'text', expected a finite number, or None"):
        scored(items("text"), function=f"{MODULE}:troubled", processes=1)


def test_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "def length(*, prompt, completion, answer, scale=1.0):\n    return scale * len(completion)\n"
        "def of_metadata(*, prompt, completion, answer, metadata):\n    return len(metadata)\n"
    )
    for processes in (0, 1):
        assert scored(items("abc"), function=f"{file}:length", params={"scale": 2.0}, processes=processes) == [6.0]
    item = Item(prompt="", completion="", answer="", metadata="1234")
    assert scored([item], function=f"{file}:of_metadata") == [4.0]
    with pytest.raises(UserError, match=r"mine.py has no function 'lenght'. Did you mean 'length'\?"):
        scored([], function=f"{file}:lenght")
    with pytest.raises(ConfigError, match=r"no.py:length', but there is no such file; a relative path starts at"):
        small_math(f"reward.function={tmp_path}/no.py:length")
    broken = tmp_path / "broken.py"
    broken.write_text("1/0\n")
    with pytest.raises(UserError, match=r"cannot be imported: ZeroDivisionError: .*\(broken\.py, line 1, in <mod"):
        scored([], function=f"{broken}:length")


def test_what_cannot_be_is_known_before_a_run() -> None:
    for override, message in (
        ("reward.function=final", "reward.function: got 'final', expected one of"),
        ("reward.params.seperator=x", "Did you mean 'reward.params.separator'?"),
        ("reward.timeout=3", "reward.timeout: this run would not read it, since num_processes is 0"),
        ("reward.num_processes=-1", "reward.num_processes: got -1"),
    ):
        with pytest.raises(ConfigError) as refused:
            small_math(override)
        assert message in str(refused.value)
    assert small_math("reward.num_processes=2", "reward.timeout=3").reward.timeout == 3


def test_a_pool_dies_with_its_parent(tmp_path: Path) -> None:
    """Also where that is killed, and its own clean-up never runs."""
    import subprocess

    script = tmp_path / "run.py"
    script.write_text(
        "import os\nfrom tests.language.rewards.test_scoring import Scorer, config, items\n"
        "if __name__ == '__main__':\n"
        f"    scorer = Scorer(config('{MODULE}:process', processes=1))\n"
        "    print(int(scorer.score(items('a'))[0]), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the pool's process outlived its parent")
