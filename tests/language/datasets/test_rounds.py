"""Further rounds of a step draw what the step has not had, and repeat."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.language.datasets.arithmetic import is_held_out
from embodied_rl.language.datasets.registry import Problem, Prompt, PromptDataset, build_dataset

PAIRS = sum(not is_held_out(x, y) for x in range(10) for y in range(10))
ROWS = 23


def files(folder: Path) -> PromptDataset:
    train, val = folder / "train.jsonl", folder / "val.jsonl"
    if not train.exists():
        train.write_text("".join(json.dumps({"prompt": f"row {n}", "answer": n}) + "\n" for n in range(ROWS)))
        val.write_text(json.dumps({"prompt": "kept", "answer": 0}) + "\n")
    return build_dataset("files", {"train_data_paths": str(train), "val_data_paths": str(val)})


def prompts(data: PromptDataset, **arguments: Any) -> list[Prompt]:
    problems: list[Problem] = list(data.draw(**arguments))
    return [problem.prompt for problem in problems]


@given(count=st.integers(1, 30), step=st.integers(0, 40), seed=st.integers(0, 3), rounds=st.integers(2, 9))
def test_rows_of_files(tmp_path_factory: pytest.TempPathFactory, count: int, step: int, seed: int, rounds: int) -> None:
    data = files(tmp_path_factory.getbasetemp())
    where = {"seed": seed, "step": step, "count": count}
    drawn = [prompts(data, **where, number=number) for number in range(rounds)]
    fresh = [prompt for part in drawn[1:] for prompt in part if prompt not in drawn[0]]
    unseen = ROWS - len(set(drawn[0]))
    others = [prompt for part in drawn[1:] for prompt in part]
    assert len(set(others[:unseen])) == min(unseen, len(others)), "no row twice"
    assert not set(others[:unseen]) & set(drawn[0]), "nor one of the first round"
    assert max(Counter(others[unseen : unseen + ROWS]).values(), default=1) == 1, "then each once again"
    assert len(set(fresh)) == min(unseen, len(others))
    again = files(tmp_path_factory.getbasetemp())
    assert [prompts(again, **where, number=number) for number in reversed(range(rounds))] == drawn[::-1]


def test_other_steps_and_seeds_have_other_further_rounds(tmp_path: Path) -> None:
    data = files(tmp_path)
    found = [
        prompts(data, seed=seed, step=step, count=5, number=number)
        for seed, step, number in ((0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1))
    ]
    assert len(set(map(tuple, found))) == 4


@given(count=st.integers(1, 60), step=st.integers(0, 40), rounds=st.integers(2, 5))
def test_sums(count: int, step: int, rounds: int) -> None:
    data = build_dataset("arithmetic", {"digits": 1})
    where = {"seed": 0, "step": step, "count": count}
    drawn = [prompts(data, **where, number=number) for number in range(rounds)]
    others = [prompt for part in drawn[1:] for prompt in part]
    unseen = PAIRS - len(set(drawn[0]))
    assert len(set(others[:unseen])) == min(unseen, len(others))
    assert not set(others[:unseen]) & set(drawn[0])
    assert [prompts(data, **where, number=number) for number in range(rounds)] == drawn
