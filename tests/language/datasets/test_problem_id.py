from __future__ import annotations

from dataclasses import replace

from embodied_rl.language.datasets.registry import Message, Problem, problem_id


def test_a_problem_is_known_by_its_prompt_and_answer() -> None:
    problem = Problem(prompt="1+1=", answer="2", source="sums")
    # Files compare by it: it must stay what it was.
    assert problem_id(problem) == problem_id(replace(problem, source="others", demonstration="2")) == "f5ee968b8893e73e"
    others = [
        replace(problem, answer="3"),
        replace(problem, prompt="1+2="),
        replace(problem, prompt=(Message(role="user", content="1+1="),)),
        replace(problem, prompt=(Message(role="system", content="1+1="),)),
    ]
    assert len({problem_id(other) for other in (problem, *others)}) == 5
    assert len(problem_id(problem)) == 16
