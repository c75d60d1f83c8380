"""From a row of a file to a problem: which column is what, and what may stand in it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from embodied_rl.errors import UserError
from embodied_rl.language.datasets.registry import Message, Problem
from embodied_rl.language.datasets.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What to read from a row."""

    prompt: str
    messages: str | None
    """Instead of ``prompt``."""
    answer: str | None
    demonstration: str | None
    source: str | None
    metadata: str | None
    chat: bool
    """Whether the prompt is a conversation."""
    system: str | None
    """The system message before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A problem and the row it came from."""

    where: str
    problem: Problem


def problem_of(row: Row, columns: Columns, source: str) -> RowProblem:
    """The row's problem.

    Args:
        source: where no column says it.

    Raises:
        UserError: a column is missing or does not hold what it should.
    """
    demonstration = None
    if columns.messages is not None:
        messages = _conversation(row, columns.messages)
        if messages[-1].role == "assistant":
            *messages, last = messages
            demonstration = last.content
        if not messages:
            raise UserError(f"{row.where}: the conversation has the assistant's turn alone; expected one to answer")
    else:
        text = row.column(columns.prompt, "prompt_key")
        if not isinstance(text, str) or not text:
            raise UserError(
                f"{row.where}: got the prompt {_shown(text)}, expected a text; correct it, set data.params.prompt_key "
                "to another column, or messages_key to one of conversations"
            )
        messages = [Message(role="user", content=text)]
    if columns.system is not None:
        if any(message.role == "system" for message in messages):
            raise UserError(
                f"{row.where}: the conversation has a system message already; leave data.params.system_prompt out"
            )
        messages = [Message(role="system", content=columns.system), *messages]
    if columns.demonstration is not None:
        demonstration = row.column(columns.demonstration, "demonstration_key")
        if not isinstance(demonstration, str):
            raise UserError(f"{row.where}: got the demonstration {_shown(demonstration)}, expected a text; correct it")
    problem = Problem(
        prompt=tuple(messages) if columns.chat else messages[0].content,
        answer=_answer(row, columns.answer),
        demonstration=demonstration,
        source=source if columns.source is None else _source(row, columns.source),
        metadata="" if columns.metadata is None else _as_text(row.column(columns.metadata, "metadata_key")),
    )
    return RowProblem(where=row.where, problem=problem)


def _answer(row: Row, name: str | None) -> str:
    if name is None:
        return ""
    value = row.column(name, "answer_key")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"{row.where}: got the answer {_shown(value)}, expected a text or a number; correct it, or set "
            "data.params.answer_key to another column"
        )
    return str(value)


def _source(row: Row, name: str) -> str:
    value = row.column(name, "source_key")
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{row.where}: got the source {_shown(value)}, expected a text; correct it, or set data.params.source_key "
            "to another column"
        )
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(row: Row, name: str) -> list[Message]:
    value = row.column(name, "messages_key")
    if isinstance(value, str):  # CSV has nothing but texts
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    messages: list[Any] = value if isinstance(value, list) else []
    if not messages or not all(_is_message(message) for message in messages):
        raise UserError(
            f"{row.where}: got the conversation {_shown(value)}, expected a list of {{role: text, content: text}}, at "
            "least one; correct it, or set data.params.prompt_key to a column of texts instead"
        )
    return [Message(role=message["role"], content=message["content"]) for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)  # with the quotes of a text
    return text if len(text) <= 80 else f"{text[:80]} ..."
