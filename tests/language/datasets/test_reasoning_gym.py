"""Problems of reasoning-gym: a function of seed, step and number, held out by their seeds, scored by the package."""

from __future__ import annotations

import re
from typing import Any

import pytest

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.datasets.reasoning_gym import final_answer
from embodied_rl.language.datasets.registry import (
    Message,
    Problem,
    PromptDataset,
    PromptEncoder,
    build_dataset,
    dataset_params,
)
from embodied_rl.language.rewards.functions import build_reward
from embodied_rl.models.causal_lm import character_tokenizer
from tests.configs import small_math
from tests.language.chat import CHAT_TEMPLATE

pytest.importorskip("reasoning_gym")
SHORT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def dataset(**params: Any) -> PromptDataset:
    return build_dataset("reasoning_gym", {"task": "chain_sum", **params} if "tasks" not in params else params)


def score(problem: Problem, completion: str) -> float | None:
    reward = build_reward("reasoning_gym", {})
    return reward(prompt="", completion=completion, answer=problem.answer, metadata=problem.metadata)


def encoder(max_length: int) -> PromptEncoder:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = CHAT_TEMPLATE
    return PromptEncoder(tokenizer, max_length)


def test_problems_are_a_function_of_seed_step_round_and_number() -> None:
    first, again = dataset(), dataset()
    drawn = first.draw(seed=1, step=2, count=8)
    assert again.draw(seed=1, step=2, count=8) == drawn
    assert again.draw(seed=1, step=2, count=3) == drawn[:3]
    others = [
        first.draw(seed=0, step=2, count=8),
        first.draw(seed=1, step=3, count=8),
        first.draw(seed=1, step=2, count=8, number=1),
        first.held_out(8),
    ]
    prompts = [frozenset(p.prompt for p in part) for part in (drawn, *others)]
    assert len(frozenset.union(*prompts)) == 40
    assert again.held_out(8) == first.held_out(8)
    assert first.held_out(3) == first.held_out(8)[:3]


def test_further_rounds_of_a_step_ask_something_else_as_long_as_there_is_anything() -> None:
    data = dataset(options=SHORT)  # ten times ten sums and differences
    drawn = [[p.prompt for p in data.draw(seed=0, step=0, count=20, number=number)] for number in range(5)]
    others = [prompt for part in drawn[1:] for prompt in part]
    assert len(set(others)) == len(others) == 80
    assert not set(others) & set(drawn[0])
    assert [p.prompt for p in data.draw(seed=0, step=0, count=20, number=4)] == drawn[4]
    assert len(data.draw(seed=0, step=0, count=250, number=1)) == 250, "more than there are"


def test_the_answer_is_the_questions() -> None:
    for problem in dataset(options=SHORT, apply_chat_template=False).draw(seed=0, step=0, count=20):
        assert isinstance(problem.prompt, str)
        found = re.search(r"(\d) ([+-]) (\d) =", problem.prompt)
        assert found is not None
        left, sign, right = found.groups()
        assert int(problem.answer) == int(left) + int(right) * (1 if sign == "+" else -1)
        assert problem.source == "chain_sum"
        assert problem.demonstration == f"<answer>{problem.answer}</answer>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>5</answer>", "5"),
        ("<answer>4</answer> no <answer> 5\n</answer> done", "5"),
        ("<answer>5", "5"),
        ("it is\n5\n", "5"),
        ("5", "5"),
        ("<answer></answer>", None),
        ("  \n", None),
        ("", None),
    ],
)
def test_what_is_answered(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_scores_are_the_packages_own() -> None:
    [problem] = dataset().draw(seed=0, step=0, count=1)
    assert score(problem, f"thinking <answer>{problem.answer}</answer>") == 1
    assert score(problem, f"thinking\n{problem.answer}") == 1
    assert score(problem, "<answer>no number</answer>") == 0
    assert score(problem, "") == 0
    partial = score(problem, f"<answer>it is {problem.answer}</answer>")
    assert partial is not None
    assert 0 < partial < 1, "credit for a part is kept"
    with pytest.raises(UserError, match="the problem is none of data=reasoning_gym"):
        build_reward("reasoning_gym", {})(prompt="", completion="", answer="")


def test_a_verifier_that_compares_by_more_than_text() -> None:
    [problem] = dataset(task="simple_equations", apply_chat_template=False).held_out(1)
    assert score(problem, f"<answer>{problem.answer}</answer>") == 1


def test_tasks_are_mixed_by_their_weights() -> None:
    tasks = [
        {"name": "chain_sum", "weight": 3.0, "options": SHORT},
        {"name": "count_bits"},
    ]
    drawn = dataset(tasks=tasks).draw(seed=0, step=0, count=200)
    share = sum(problem.source == "chain_sum" for problem in drawn) / 200
    assert {problem.source for problem in drawn} == {"chain_sum", "count_bits"}
    assert 0.65 < share < 0.85
    assert all(score(problem, problem.answer) == 1 for problem in drawn[:20])


def test_questions_are_asked_through_the_template_or_plainly() -> None:
    [asked] = dataset(system_prompt="be brief", instruction=" Answer!").draw(seed=0, step=0, count=1)
    assert isinstance(asked.prompt, tuple)
    assert asked.prompt[0] == Message(role="system", content="be brief")
    [plain] = dataset(apply_chat_template=False, instruction=" Answer!").draw(seed=0, step=0, count=1)
    assert asked.prompt[1] == Message(role="user", content=plain.prompt if isinstance(plain.prompt, str) else "")
    tokenizer = encoder(64)
    tokenizer._tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        dataset().prepare(tokenizer)


def test_long_questions_are_drawn_again() -> None:
    whole = dataset(apply_chat_template=False, options={"max_terms": 6})
    lengths = sorted(len(p.prompt) for p in whole.draw(seed=0, step=0, count=40))
    limit = lengths[20]
    assert lengths[-1] > limit
    data = dataset(apply_chat_template=False, options={"max_terms": 6}, overlong="filter")
    data.prepare(encoder(limit))
    drawn = data.draw(seed=0, step=0, count=40)
    assert all(len(p.prompt) <= limit for p in drawn)
    assert drawn == data.draw(seed=0, step=0, count=40)
    data.prepare(encoder(10))
    with pytest.raises(UserError, match=r"100 problems in a row had more than data.max_prompt_length=10 tokens"):
        data.draw(seed=0, step=0, count=1)
    cut = dataset(apply_chat_template=False, overlong="truncate_left")
    cut.prepare(encoder(10))
    [problem] = cut.draw(seed=0, step=0, count=1)
    assert len(encoder(10).tokens(problem)) == 10


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "chain_sums"}, "data.params.task: got 'chain_sums', expected one of the "),
        ({"task": "chain_sums"}, "Did you mean 'chain_sum'?"),
        ({}, "data.params.task: got no task; name one"),
        ({"task": "chain_sum", "tasks": [{"name": "count_bits"}]}, "data.params.task: got both task and tasks"),
        ({"tasks": [{"name": "count_bits"}], "options": {}}, "data.params.options: belongs to a single task"),
        ({"task": "chain_sum", "options": {"max_digit": 3}}, "Did you mean 'data.params.options.max_digits'?"),
        ({"task": "chain_sum", "options": {"seed": 3}}, "data.params.options.seed: no such key"),
        ({"task": "chain_sum", "apply_chat_template": False, "system_prompt": "s"}, "only the chat template has room"),
        ({"tasks": [{"name": "count_bits", "weight": 0.0}]}, "data.params.tasks.0.weight: got 0.0"),
    ],
)
def test_what_cannot_be_is_refused_at_once(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dataset_params("reasoning_gym", params)
    assert message in str(refused.value)


def test_an_option_that_the_task_refuses_is_one_message() -> None:
    with pytest.raises(UserError, match=r"reasoning-gym's chain_sum does not take .*min_digits"):
        dataset(options={"min_digits": 5, "max_digits": 2})
    with pytest.raises(UserError, match="there is no end of held-out problems"):
        dataset().held_out(None)


def test_the_configuration_is_whole() -> None:
    config = small_math("data=reasoning_gym", "~data.params.digits", "data.params.task=count_bits")
    assert (config.data.params, config.reward.function) == ({"task": "count_bits"}, "reasoning_gym")
