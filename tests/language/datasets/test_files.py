"""Prompts from files: every row is found again, drawn once a pass, held out by content; mistakes are one message."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.datasets.files import Files, FilesParams
from embodied_rl.language.datasets.registry import (
    Message,
    Problem,
    PromptDataset,
    PromptEncoder,
    build_dataset,
    dataset_params,
)
from embodied_rl.models.causal_lm import character_tokenizer
from tests.configs import small_math
from tests.language.chat import CHAT_TEMPLATE

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1, "solution": f"it is {n + 1}"} for n in range(20)]


def written(path: Path, rows: Sequence[Any]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(paths: str | list[str], **options: Any) -> PromptDataset:
    return build_dataset("files", {"train_data_paths": paths, **options})


def encoder(max_length: int = 64, template: str | None = CHAT_TEMPLATE) -> PromptEncoder:
    tokenizer = character_tokenizer("0123456789+=abcdefghijklmnopqrstuvwxyz <>\n")
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, max_length)


def training_rows(data: PromptDataset, count: int) -> list[Problem]:
    return list(data.draw(seed=0, step=0, count=count))


@pytest.mark.parametrize("extension", ["json", "jsonl", "csv", "parquet"])
def test_every_row_is_found_again_in_any_format(tmp_path: Path, extension: str) -> None:
    first, second = (
        written(tmp_path / f"{name}.{extension}", part) for name, part in (("a", ROWS[:12]), ("b", ROWS[12:]))
    )
    data = dataset([first, second], demonstration_key="solution", val_size=4)
    held_out = data.held_out(None)
    found = [*training_rows(data, 16), *held_out]
    assert len(held_out) == 4
    assert {(p.prompt, p.answer, p.demonstration) for p in found} == {
        (row["prompt"], str(row["answer"]), row["solution"]) for row in ROWS
    }


@given(rows=st.integers(1, 12), count=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_row_is_drawn_once_before_any_twice(
    tmp_path_factory: pytest.TempPathFactory, rows: int, count: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    train = written(folder / "train.jsonl", ROWS[:rows])
    data = dataset(train, val_data_paths=written(folder / "val.jsonl", ROWS[:1]))
    stream = [p.prompt for step in range(10) for p in data.draw(seed=seed, step=step, count=count)]
    for start in range(0, len(stream) - rows + 1, rows):
        assert set(stream[start : start + rows]) == {row["prompt"] for row in ROWS[:rows]}
    assert stream == [p.prompt for step in range(10) for p in data.draw(seed=seed, step=step, count=count)]


def test_passes_seeds_and_rounds_differ(tmp_path: Path) -> None:
    data = dataset(written(tmp_path / "a.jsonl", ROWS), val_size=4)
    drawn = [
        [p.prompt for p in data.draw(seed=seed, step=step, count=16, number=number)]
        for seed, step, number in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    assert len(set(map(tuple, drawn))) == 4
    assert len(set(map(frozenset, drawn))) == 1


@given(order=st.permutations(range(20)), share=st.sampled_from([{"val_fraction": 0.3}, {"val_size": 5}]))
def test_held_out_prompts_do_not_depend_on_the_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], share: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    first = dataset(written(folder / "a.jsonl", ROWS), **share)
    other = dataset(written(folder / "b.jsonl", [ROWS[n] for n in order]), **share)
    asked = [[(p.prompt, p.answer) for p in data.held_out(None)] for data in (first, other)]
    assert asked[0] == asked[1]
    trained = {p.prompt for p in training_rows(other, 40)}
    assert trained | {p.prompt for p in other.held_out(None)} == {row["prompt"] for row in ROWS}
    assert not trained & {p.prompt for p in other.held_out(None)}


def test_held_out_prompts_are_those_of_the_rows_whatever_is_said_before_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    ways = ({}, {"apply_chat_template": True}, {"apply_chat_template": True, "system_prompt": "Think."})
    held_out = [
        [p.prompt if isinstance(p.prompt, str) else p.prompt[-1].content for p in data.held_out(None)]
        for data in (dataset(path, val_fraction=0.3, **way) for way in ways)
    ]
    assert held_out[0]
    assert held_out[0] == held_out[1] == held_out[2]


def test_a_prompt_that_occurs_often_is_on_one_side(tmp_path: Path) -> None:
    rows = [*ROWS, *({**row, "answer": f"another {n}"} for n, row in enumerate(ROWS)), *ROWS]
    data = dataset(written(tmp_path / "a.jsonl", rows), val_size=5)
    held_out = [p.prompt for p in data.held_out(None)]
    assert len(set(held_out)) == len(held_out) == 5
    counts = Counter(p.prompt for p in training_rows(data, 45))
    assert set(counts.values()) == {3}
    assert not set(counts) & set(held_out)


def test_validation_files_keep_their_order(tmp_path: Path) -> None:
    data = dataset(
        written(tmp_path / "a.jsonl", ROWS[:5]), val_data_paths=[written(tmp_path / "v.csv", ROWS[10:14][::-1])]
    )
    assert [p.answer for p in data.held_out(3)] == ["14", "13", "12"]
    assert {p.answer for p in training_rows(data, 5)} == {"1", "2", "3", "4", "5"}


def test_columns_may_lie_in_objects(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "reward_model": {"ground_truth": n}} for n in range(6)]
    data = dataset(
        written(tmp_path / "a.jsonl", rows), prompt_key="question", answer_key="reward_model.ground_truth", val_size=1
    )
    assert all(p.prompt == f"q{p.answer}" for p in training_rows(data, 5))
    without = dataset(written(tmp_path / "b.jsonl", rows), prompt_key="question", answer_key=None, val_size=1)
    assert {p.answer for p in training_rows(without, 5)} == {""}


def test_sources_are_a_column_or_the_files_name(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "answer": n, "from": "odd" if n % 2 else "even"} for n in range(4)]
    paths = written(tmp_path / "algebra.jsonl", rows), written(tmp_path / "words.jsonl", ROWS[:2])
    data = dataset(paths[0], val_data_paths=list(paths))
    assert [p.source for p in data.held_out(None)] == ["algebra"] * 4 + ["words"] * 2
    named = dataset(paths[0], val_data_paths=paths[0], source_key="from")
    assert [p.source for p in named.held_out(None)] == ["even", "odd"] * 2
    with pytest.raises(UserError, match=r"words.jsonl, line 1: no column 'from', but prompt, answer, solution"):
        dataset(paths[0], val_data_paths=paths[1], source_key="from")
    with pytest.raises(UserError, match=r"line 1: got the source 0, expected a text"):
        dataset(paths[0], val_data_paths=paths[0], source_key="answer")


def test_metadata_is_a_text_or_json(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1, "more": {"unit": "m"}}, {"prompt": "b", "answer": 1, "more": "plain"}]
    path = written(tmp_path / "a.jsonl", rows)
    held_out = dataset(path, val_data_paths=path, metadata_key="more").held_out(None)
    assert [p.metadata for p in held_out] == ['{"unit": "m"}', "plain"]
    assert [p.metadata for p in dataset(path, val_data_paths=path).held_out(None)] == ["", ""]


@pytest.mark.parametrize("row", [{"prompt": "x"}, {"answer": 1}, {"prompt": 3, "answer": 1}])
def test_held_out_rows_are_checked_like_training_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    train, val = written(tmp_path / "a.jsonl", ROWS), written(tmp_path / "v.jsonl", [ROWS[0], row])
    with pytest.raises(UserError, match=r"v.jsonl, line 2: "):
        dataset(train, val_data_paths=val)


@pytest.mark.parametrize("overlong", ["error", "filter", "truncate_left", "truncate_right"])
def test_held_out_prompts_are_tokenized_at_the_start(tmp_path: Path, overlong: str) -> None:
    train, val = written(tmp_path / "a.jsonl", ROWS), written(tmp_path / "v.jsonl", [{"prompt": "ä", "answer": 1}])
    with pytest.raises(UserError, match=r"v.jsonl, line 1: the prompt 'ä' has characters"):
        dataset(train, val_data_paths=val, overlong=overlong).prepare(encoder())


@pytest.mark.parametrize("extension", ["jsonl", "csv"])
def test_conversations_go_through_the_template(tmp_path: Path, extension: str) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    rows = [{"talk": [*turns, {"role": "user", "content": f"ask {n}"}], "answer": n} for n in range(4)]
    shown = [{**row, "talk": json.dumps(row["talk"])} for row in rows] if extension == "csv" else rows
    data = dataset(
        written(tmp_path / f"a.{extension}", shown), messages_key="talk", system_prompt="be brief", val_size=1
    )
    [first] = training_rows(data, 1)
    assert isinstance(first.prompt, tuple)
    assert first.prompt[0] == Message(role="system", content="be brief")
    assert encoder().text(first.prompt) == (
        f"<system>be brief\n<user>hello\n<assistant>hi\n<user>ask {first.answer}\n<assistant>"
    )
    assert first.demonstration is None


def test_a_last_turn_of_the_assistant_is_the_demonstration(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
    rows = [{"messages": [{"role": "system", "content": str(n)}, *turns]} for n in range(3)]
    data = dataset(written(tmp_path / "a.jsonl", rows), messages_key="messages", answer_key=None, val_size=1)
    for problem in training_rows(data, 2):
        assert problem.demonstration == "say"
        assert [message.role for message in problem.prompt if isinstance(message, Message)] == ["system", "user"]


def test_a_text_may_be_asked_through_the_template(tmp_path: Path) -> None:
    data = dataset(written(tmp_path / "a.jsonl", ROWS[:2]), apply_chat_template=True, val_size=1)
    [problem] = training_rows(data, 1)
    made = encoder()
    text = f"<user>{int(problem.answer) - 1}+1=\n<assistant>"
    assert made.text(problem.prompt) == text
    assert len(made.tokens(problem)) == len(text)  # a token a character: the template's marks are not added twice


@pytest.mark.parametrize(("overlong", "kept"), [("truncate_left", "x" * 6 + "1="), ("truncate_right", "1" + "x" * 7)])
def test_long_prompts_are_cut_where_asked(tmp_path: Path, overlong: str, kept: str) -> None:
    rows = [{"prompt": "1" + "x" * 78 + "1=", "answer": 1}]
    data = dataset(
        written(tmp_path / "a.jsonl", rows), val_data_paths=written(tmp_path / "v.jsonl", ROWS), overlong=overlong
    )
    made = encoder(8)
    assert data.prepare(made) is None
    [problem] = training_rows(data, 1)
    assert made._tokenizer.decode(list(made.tokens(problem))) == kept
    assert len(made.tokens(data.held_out(1)[0])) == 4, "a short one is whole"


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    train, val = written(tmp_path / "a.jsonl", ROWS), written(tmp_path / "v.jsonl", ROWS[8:12])
    data = dataset(train, val_data_paths=val, overlong="filter")
    note = data.prepare(encoder(4))
    assert note
    assert "left out 10 of 20 training prompts and 2 of 4 held-out ones" in note
    assert {p.prompt for p in training_rows(data, 30)} == {f"{n}+1=" for n in range(10)}
    assert [p.prompt for p in data.held_out(None)] == ["8+1=", "9+1="]
    assert dataset(train, val_data_paths=val, overlong="filter").prepare(encoder(5)) is None
    with pytest.raises(UserError, match=r"each of the training prompts has more than data.max_prompt_length=2"):
        dataset(train, val_data_paths=val, overlong="filter").prepare(encoder(2))


def test_a_long_prompt_is_named_with_its_row(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {"prompt": "9" * 80, "answer": 1}]
    data = dataset(written(tmp_path / "a.jsonl", rows), val_data_paths=written(tmp_path / "v.jsonl", ROWS[:1]))
    with pytest.raises(
        UserError, match=r"a.jsonl, line 3: the prompt '9+' has 80 tokens, .*data.max_prompt_length=8; .*filter"
    ):
        data.prepare(encoder(8))
    rows[2]["prompt"] = "ä="
    data = dataset(written(tmp_path / "a.jsonl", rows), val_data_paths=written(tmp_path / "v.jsonl", ROWS[:1]))
    with pytest.raises(UserError, match=r"a.jsonl, line 3: the prompt 'ä=' has characters"):
        data.prepare(encoder(8))


def test_templates_that_are_missing_or_refuse(tmp_path: Path) -> None:
    data = dataset(written(tmp_path / "a.jsonl", ROWS), apply_chat_template=True, val_size=1)
    with pytest.raises(UserError, match=r"has no chat template.*apply_chat_template=false"):
        data.prepare(encoder(template=None))
    with pytest.raises(UserError, match=r"chat template refuses .*: no such role"):
        data.prepare(encoder(template="{{ raise_exception('no such role') }}"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a.jsonl: the file has no rows"),
        ("a.json", "", r"a.json: the file has no rows"),
        ("a.csv", "prompt,answer\n", r"a.csv: the file has no rows"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n\n{"prompt"\n', r"a.jsonl, line 3: not JSON .*'\{\"prompt\"'"),
        ("a.jsonl", "[1]\n", r"a.jsonl, line 1: got a list, expected an object"),
        ("a.json", '[{"prompt": "x",\n}]', r"a.json, line \d: not JSON"),
        ("a.json", '{"prompt": "x"}', r"a.json: got an object, expected a list of objects"),
        ("a.csv", "prompt,answer\n1,2,3\n", r"a.csv, line 2: 3 fields, expected the 2 .*quote"),
        ("a.csv", 'prompt,answer\n"1,2\n', r"a.csv, line 2: not CSV"),
        ("a.jsonl", b"\xff\xfe", r"a.jsonl: not UTF-8"),
        (
            "a.jsonl",
            '{"promt": "x", "answer": 1}',
            r"line 1: no column 'prompt', but promt, answer; .*Did you mean 'promt'",
        ),
        ("a.jsonl", '{"prompt": "x"}', r"line 1: no column 'answer', but prompt; set data.params.answer_key"),
        ("a.jsonl", '{"prompt": 3, "answer": 1}', r"line 1: got the prompt 3, expected a text"),
        ("a.jsonl", '{"prompt": "x", "answer": [1]}', r"line 1: got the answer \[1\], expected a text or a number"),
        ("a.jsonl", '{"prompt": "x", "answer": null}', r"line 1: got the answer null"),
        ("a.jsonl", '{"prompt": "x", "answer": true}', r"line 1: got the answer true"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as refused:
        dataset(str(tmp_path / name))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("talk", ["hello", [], [{"role": "user"}], [{"role": "user", "content": 3}], None])
def test_conversations_that_are_none(tmp_path: Path, talk: Any) -> None:
    path = written(tmp_path / "a.jsonl", [{"talk": talk, "answer": 1}])
    with pytest.raises(
        UserError, match=r"line 1: got the conversation .*expected a list of \{role: text, content: text\}"
    ):
        dataset(path, messages_key="talk")


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = written(tmp_path / "a.jsonl", [{"talk": talk, "answer": 1}])
    with pytest.raises(UserError, match=r"line 1: the conversation has a system message already"):
        dataset(path, messages_key="talk", system_prompt="t")


def test_holding_out_too_much(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(UserError, match=r"val_size=20: the files have 20 different prompts"):
        dataset(path, val_size=20)
    with pytest.raises(UserError, match=r"val_fraction=0.001: that holds out 0 of 20"):
        dataset(path, val_fraction=0.001)
    with pytest.raises(UserError, match=r"data.eval_size=4: 3 prompts are held out"):
        dataset(path, val_size=3).held_out(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_data_paths": "no.jsonl"}, "data.params.train_data_paths: no.jsonl: no such file"),
        ({"train_data_paths": ["a.txt"]}, "a.txt: got the extension '.txt', expected one of .json, .jsonl, .csv"),
        ({"train_data_paths": []}, "data.params.train_data_paths: got no file"),
        ({"val_data_paths": "no.csv"}, "data.params.val_data_paths: no.csv: no such file"),
        ({"val_size": 2, "val_fraction": 0.5}, "got val_fraction and val_size"),
        ({"messages_key": "m", "prompt_key": "p"}, "data.params.messages_key: got 'm' and prompt_key='p'"),
        ({"messages_key": "m", "apply_chat_template": False}, "data.params.apply_chat_template: got false"),
        ({"system_prompt": "s"}, "data.params.system_prompt: only the chat template has room"),
        ({"prompt_keys": "p"}, "Did you mean 'data.params.prompt_key'?"),
        ({"overlong": "drop"}, "data.params.overlong: got 'drop'"),
    ],
)
def test_options_are_refused_before_anything_is_read(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "a.jsonl", ["not read"])
    with pytest.raises(ConfigError) as refused:
        dataset_params("files", {"train_data_paths": path, **options})
    assert len(refused.value.problems) == 1
    assert message in refused.value.problems[0]


def test_demonstrations_must_be_named_for_imitation(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    [problem] = Files.problems(FilesParams(train_data_paths=path), imitation=True)
    assert problem.startswith("data.params.demonstration_key: task=sft imitates demonstrations")
    assert not list(Files.problems(FilesParams(train_data_paths=path, demonstration_key="solution"), imitation=True))


def test_the_configuration_is_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.params.train_data_paths: missing; set it with"):
        small_math("data=files", "~data.params.digits")
    with pytest.raises(ConfigError, match=r"data.params.train_data_paths: .*no.jsonl: no such file"):
        small_math("data=files", "~data.params.digits", f"data.params.train_data_paths=[{tmp_path}/no.jsonl]")


def test_half_of_a_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine \\ud83d\\ude00", "answer": "1"}\n{"prompt": "\\ud83d", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: '\\ud83d' is half of a character \(a lone surrogate\)"):
        dataset(str(path))
