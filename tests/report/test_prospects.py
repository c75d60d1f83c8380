"""What a probe says of a policy, against numbers by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.errors import UserError
from embodied_rl.report.data import read_run
from embodied_rl.report.prospects import Prospects, mixed, prospects_of
from tests.report.runs import make_run

NONE, HALF, ALL = [[0, 0, 0, 0]] * 2, [[1, 1, 0, 0], [1, 0, 1, 0]], [[1, 1, 1, 1]] * 2


def probe(
    path: Path, *, rates: tuple[float, float], equal: float, spread: float = 0.3, greedy: Sequence[Any], size: int = 4
) -> Prospects:
    """Of two steps of 64 episodes, 32 of each of two tasks."""
    step = {
        "time/step": 10.0,
        "env/episodes": 64.0,
        "env/success_once": sum(rates) / 2,
        "env/return_std": spread,
        "env/episode_len": 30.0,
        "env_task/00_left/success": rates[0],
        "env_task/07_right/success": rates[1],
        "actor/groups": 64.0 / size,
        "actor/groups_equal": equal,
        "actor/entropy": 0.5,
        "actor/samples": 512.0,
    }
    rows = [{"step": 1, **step}, {"step": 2, **step}]
    return prospects_of(
        read_run(make_run(path, rows=rows, changes={"algorithm.group_size": size}, evaluated={0: greedy}))
    )


def test_numbers_by_hand(tmp_path: Path) -> None:
    found = probe(tmp_path / "run", rates=(0.5, 0.25), equal=0.25, greedy=HALF)
    assert (found.sampled.successes, found.sampled.count) == (48, 128)
    assert (found.greedy.successes, found.greedy.count) == (4, 8)
    assert mixed(0.5, 2) == 0.5
    # 1 - 2/16 = 0.875 and 1 - 1/256 - 81/256 = 0.6796875
    assert found.expected == pytest.approx((0.875 + 0.6796875) / 2)
    assert found.by_group_size()[4] == found.expected
    assert found.informative == 0.75
    assert found.informative_samples == 384
    content = json.loads(json.dumps(found.as_json()))
    assert content["informative_samples_per_hour"] == 384 * 360
    assert content["case"] == "sometimes"


@pytest.mark.parametrize(
    ("case", "rates", "equal", "greedy", "spread", "advice"),
    [
        ("never", (0.0, 0.0), 1.0, NONE, 0.0, "nothing succeeds yet (at most 32.4% would"),
        ("dense", (0.0, 0.0), 0.0, NONE, 0.3, "a dense reward can lead to the first success"),
        ("always", (1.0, 0.95), 0.9, ALL, 0.1, "little left to learn"),
        ("alike", (0.5, 0.5), 0.9, HALF, 0.5, "raise algorithm.sampling_params.temperature"),
        ("rare", (0.01, 0.01), 0.97, NONE, 0.1, "larger algorithm.group_size"),
        ("sometimes", (0.5, 0.0), 0.5, HALF, 0.5, "1 of 2 tasks always ended alike"),
    ],
)
def test_cases(
    tmp_path: Path, case: str, rates: tuple[float, float], equal: float, greedy: list[Any], spread: float, advice: str
) -> None:
    found = probe(tmp_path / "run", rates=rates, equal=equal, greedy=greedy, spread=spread)
    assert found.case == case
    assert any(advice in text for text in found.advice), found.advice


def test_without_groups_the_spread_of_returns_says_it(tmp_path: Path) -> None:
    assert probe(tmp_path / "a", rates=(0.0, 0.0), equal=1.0, greedy=NONE, spread=0.2, size=1).case == "dense"
    found = probe(tmp_path / "b", rates=(0.0, 0.0), equal=1.0, greedy=NONE, spread=0.0, size=1)
    assert (found.case, found.informative, found.expected) == ("never", None, None)


def test_tasks_that_end_alike_are_left_out_by_number(tmp_path: Path) -> None:
    found = probe(tmp_path / "run", rates=(0.0, 0.5), equal=0.5, greedy=HALF)
    assert any("env.task_ids=[7]" in text for text in found.advice)


def test_a_task_counts_in_the_steps_that_played_it(tmp_path: Path) -> None:
    shared = {
        "time/step": 10.0,
        "env/episodes": 8.0,
        "env/success_once": 0.5,
        "env/return_std": 0.3,
        "env/episode_len": 30.0,
        "actor/groups": 2.0,
        "actor/groups_equal": 0.5,
        "actor/samples": 64.0,
    }
    first = {"env_task/00_left/success": 0.25, "env_task/07_right/success": 1.0}
    second = {"env_task/00_left/success": 0.75, "env_task/03_middle/success": 0.5}
    rows = [{"step": 1, **shared, **first}, {"step": 2, **shared, **second, "actor/entropy": 0.7}]
    changes = {"algorithm.group_size": 4}
    found = prospects_of(read_run(make_run(tmp_path / "run", rows=rows, changes=changes, evaluated={0: HALF})))
    assert found.sampled_tasks == {"00_left": 0.5, "03_middle": 0.5, "07_right": 1.0}
    assert found.entropy == 0.7


def test_drawn_and_likeliest_are_held_apart(tmp_path: Path) -> None:
    worse = probe(tmp_path / "a", rates=(0.1, 0.1), equal=0.5, greedy=ALL)
    assert any("lower algorithm.sampling_params.temperature" in text for text in worse.advice)
    better = probe(tmp_path / "b", rates=(0.7, 0.7), equal=0.5, greedy=NONE)
    assert any("temperature_eval" in text for text in better.advice)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env.train.max_episode_steps": 8, "env.eval.max_episode_steps": 32}, "were played for 8 steps"),
        ({"eval_env": {"env_type": "dummy"}}, "were played in eval_env"),
    ],
)
def test_episodes_of_two_kinds_are_not_compared(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    row = {"step": 1, "time/step": 1.0, "env/episodes": 64.0, "env/success_once": 0.1, "actor/samples": 64.0}
    changes = {"algorithm.group_size": 1, **changes}
    found = prospects_of(read_run(make_run(tmp_path / "run", rows=[row], changes=changes, evaluated={0: ALL})))
    [advice] = [text for text in found.advice if "rates say nothing of each other" in text]
    assert said in advice
    assert not [text for text in found.advice if "temperature:" in text or "less often" in text]


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected an evaluation and training steps"):
        prospects_of(read_run(make_run(tmp_path / "run", rows=[])))
