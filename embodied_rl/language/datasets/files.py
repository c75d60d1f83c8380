"""``files``: prompts, answers and demonstrations from files of one's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from embodied_rl.errors import UserError
from embodied_rl.language.datasets.registry import (
    CUTS,
    Message,
    Overlong,
    Problem,
    PromptDataset,
    PromptEncoder,
    system_prompt_problems,
)
from embodied_rl.language.datasets.rows import Row, path_problem, read_rows
from embodied_rl.seeding import generator

Paths = str | tuple[str, ...]
_HELD_OUT_SHARE = 0.1
"""The share that is held out where nothing says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesParams:
    """``data.params`` of ``files``. A column ``outer.inner`` is the field ``inner`` of objects in ``outer``."""

    train_data_paths: Paths
    """One file or several: .json (a list of objects), .jsonl, .csv (with a line of names) or .parquet."""
    val_data_paths: Paths | None = None
    """Held-out prompts, in the files' order; null: some of the training files' are held out."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the prompts to hold out, by a hash of each; null: 0.1, where nothing else says what."""
    val_size: Annotated[int, Field(ge=1)] | None = None
    """Number of prompts to hold out instead: those with the smallest hash."""
    prompt_key: str | None = None
    """Column of the prompts' text; null: ``prompt``, unless there is ``messages_key``."""
    messages_key: str | None = None
    """Column of conversations instead, each a list of {role, content}; in CSV files, that as JSON. What the assistant
    says at the end of one is the demonstration."""
    answer_key: str | None = "answer"
    """Column of the answers, text or number; null: the reward function needs none and gets an empty text."""
    demonstration_key: str | None = None
    """Column of right completions, for ``task=sft``."""
    source_key: str | None = None
    """Column that says where a row comes from: an evaluation counts each source by itself; null: the file's name."""
    metadata_key: str | None = None
    """Column for reward functions that take ``metadata``, as text; what is none as JSON."""
    apply_chat_template: bool | None = None
    """Ask through the tokenizer's own chat template, a text as the user's only turn; null: conversations alone."""
    system_prompt: str | None = None
    """A system message before each conversation."""
    overlong: Overlong = "error"
    """Treatment of prompts of more than ``data.max_prompt_length`` tokens: end the run, leave them out and say how
    many, or drop tokens at the start or at the end."""

    @property
    def chat(self) -> bool:
        """True if prompts are conversations."""
        return self.messages_key is not None or bool(self.apply_chat_template)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowProblem:
    """A problem and its row's file and line."""

    where: str
    problem: Problem


class Files(PromptDataset):
    """Every training row is drawn once before any is drawn again, in an order that is a function of the seed and the
    pass alone. Further rounds of a step take other rows than the step has had, as long as there are any, in an order of
    the seed and the step; to the passes they do not count.

    Held out are prompts, not rows: one row of each, and no row with that prompt is trained on. Which ones depends on
    the prompts alone, not on their order, their file or their answers.
    """

    Params = FilesParams

    def __init__(self, params: FilesParams) -> None:
        self._params = params
        rows = _read(params.train_data_paths, params)
        if params.val_data_paths is not None:
            self._train, self._val = rows, _read(params.val_data_paths, params)
        else:
            self._train, self._val = _split(rows, params)

    @classmethod
    def problems(cls, params: FilesParams, *, imitation: bool) -> Iterator[str]:
        for key in ("train_data_paths", "val_data_paths"):
            paths = getattr(params, key)
            if paths is not None and not _listed(paths):
                yield f"data.params.{key}: got no file; name one or several"
            for path in _listed(paths or ()):
                if problem := path_problem(path):
                    yield f"data.params.{key}: {problem}"
        given = [key for key in ("val_data_paths", "val_fraction", "val_size") if getattr(params, key) is not None]
        if len(given) > 1:
            yield f"data.params: got {' and '.join(given)}, each of which says what is held out; leave one of them"
        if params.messages_key is not None:
            for key in ("prompt_key", "demonstration_key"):
                if getattr(params, key) is not None:
                    yield (
                        f"data.params.messages_key: got {params.messages_key!r} and {key}={getattr(params, key)!r}; a "
                        "conversation holds both prompt and demonstration, so leave one of the two keys out"
                    )
            if params.apply_chat_template is False:
                yield (
                    "data.params.apply_chat_template: got false with messages_key, but only the template makes a text "
                    "of a conversation; leave it out"
                )
        yield from system_prompt_problems(params.system_prompt, chat=params.chat)
        if imitation and params.demonstration_key is None and params.messages_key is None:
            yield (
                "data.params.demonstration_key: task=sft imitates demonstrations; set it to their column, or "
                "messages_key to that of conversations which end with the assistant's turn"
            )

    def prepare(self, encoder: PromptEncoder) -> str | None:
        encoder.text(self._train[0].problem.prompt)  # a tokenizer without chat template is no row's fault
        fitting = [[row for row in rows if self._fits(row, encoder)] for rows in (self._train, self._val)]
        counts = [len(self._train), len(self._val)]
        dropped = [count - len(rows) for count, rows in zip(counts, fitting, strict=True)]
        for rows, kind in zip(fitting, ("training", "held-out"), strict=True):
            if not rows:
                raise UserError(
                    f"data.params.overlong=filter: each of the {kind} prompts has more than data.max_prompt_length="
                    f"{encoder.max_length} tokens, so nothing is left; raise that, or use another overlong"
                )
        self._train, self._val = fitting
        if not any(dropped):
            return None
        return (
            f"data.params.overlong=filter: left out {dropped[0]} of {counts[0]} training prompts and {dropped[1]} of "
            f"{counts[1]} held-out ones, with more than data.max_prompt_length={encoder.max_length} tokens"
        )

    def draw(self, *, seed: int, step: int, count: int, number: int = 0) -> Sequence[Problem]:
        rows, first = len(self._train), step * count
        order = [
            index
            for epoch in range(first // rows, (first + count - 1) // rows + 1)
            for index in generator(seed, 0, epoch).permutation(rows)
        ]
        drawn = order[first % rows :][:count]
        if number:
            drawn = list(islice(self._others(drawn, seed, step), (number - 1) * count, number * count))
        return [self._train[index].problem for index in drawn]

    def _others(self, had: Sequence[int], seed: int, step: int) -> Iterator[int]:
        """Indices of rows for the further rounds of a step whose first one had these: first the others, then all again
        and again."""
        rng = generator(seed, 1, step)
        left = np.setdiff1d(np.arange(len(self._train)), had)
        while True:
            yield from rng.permutation(left).tolist()
            left = np.arange(len(self._train))

    def held_out(self, count: int | None) -> Sequence[Problem]:
        if count is not None and count > len(self._val):
            raise UserError(
                f"data.eval_size={count}: {len(self._val)} prompts are held out; use a smaller number, null for all, "
                "or hold out more with data.params.val_size or val_data_paths"
            )
        return [row.problem for row in self._val[:count]]

    def _fits(self, row: _RowProblem, encoder: PromptEncoder) -> bool:
        try:
            if self._params.overlong == "filter":
                return len(encoder.whole(row.problem.prompt)) <= encoder.max_length
            encoder.tokens(row.problem)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from error
        return True


def _listed(paths: Paths) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def _read(paths: Paths, params: FilesParams) -> list[_RowProblem]:
    return [
        _RowProblem(where=row.where, problem=_problem(row, params, Path(path).stem))
        for path in _listed(paths)
        for row in read_rows(path)
    ]


def _problem(row: Row, params: FilesParams, file: str) -> Problem:
    demonstration = None
    if params.messages_key is not None:
        messages = _conversation(row, params.messages_key)
        if messages[-1].role == "assistant":
            *messages, last = messages
            demonstration = last.content
        if not messages:
            raise UserError(f"{row.where}: the conversation has the assistant's turn alone; expected one to answer")
    else:
        messages = [Message(role="user", content=_text(row, "prompt", params.prompt_key or "prompt"))]
    if params.system_prompt is not None:
        if any(message.role == "system" for message in messages):
            raise UserError(
                f"{row.where}: the conversation has a system message already; leave data.params.system_prompt out"
            )
        messages = [Message(role="system", content=params.system_prompt), *messages]
    if params.demonstration_key is not None:
        demonstration = _text(row, "demonstration", params.demonstration_key)
    metadata = "" if params.metadata_key is None else row.column(params.metadata_key, "metadata_key")
    return Problem(
        prompt=tuple(messages) if params.chat else messages[0].content,
        answer="" if params.answer_key is None else _answer(row, params.answer_key),
        demonstration=demonstration,
        cut=CUTS.get(params.overlong),
        source=file if params.source_key is None else _text(row, "source", params.source_key),
        metadata=metadata if isinstance(metadata, str) else _json(metadata),
    )


def _text(row: Row, kind: str, column: str) -> str:
    value = row.column(column, f"{kind}_key")
    if isinstance(value, str) and (value or kind == "demonstration"):
        return value
    instead = ", or messages_key to one of conversations" if kind == "prompt" else ""
    raise UserError(
        f"{row.where}: got the {kind} {_shown(value)}, expected a text; correct it, or set data.params.{kind}_key to "
        f"another column{instead}"
    )


def _answer(row: Row, column: str) -> str:
    value = row.column(column, "answer_key")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"{row.where}: got the answer {_shown(value)}, expected a text or a number; correct it, or set "
            "data.params.answer_key to another column"
        )
    return str(value)


def _conversation(row: Row, column: str) -> list[Message]:
    value = row.column(column, "messages_key")
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:
    text = _json(value)  # with the quotes of a text
    return text if len(text) <= 80 else f"{text[:80]} ..."


def _split(rows: list[_RowProblem], params: FilesParams) -> tuple[list[_RowProblem], list[_RowProblem]]:
    """Training and held-out rows."""
    digests = [_digest(row.problem, params) for row in rows]
    distinct = sorted(set(digests))
    if params.val_size is not None:
        if params.val_size >= len(distinct):
            raise UserError(
                f"data.params.val_size={params.val_size}: the files have {len(distinct)} different prompts, and some "
                "must be left to train on; hold out fewer"
            )
        chosen = set(distinct[: params.val_size])
    else:
        share = params.val_fraction or _HELD_OUT_SHARE
        chosen = {digest for digest in distinct if int.from_bytes(digest, "big") < share * 256 ** len(digest)}
        if not 0 < len(chosen) < len(distinct):
            raise UserError(
                f"data.params.val_fraction={share}: that holds out {len(chosen)} of {len(distinct)} different prompts, "
                "expected some and not all; set data.params.val_size instead, or val_data_paths"
            )
    held_out: dict[bytes, _RowProblem] = {}
    for digest, row in zip(digests, rows, strict=True):
        if digest in chosen:
            known = held_out.setdefault(digest, row)
            if row.problem.answer < known.problem.answer:  # the same one for any order of the rows
                held_out[digest] = row
    train = [row for digest, row in zip(digests, rows, strict=True) if digest not in chosen]
    return train, [held_out[digest] for digest in sorted(held_out)]


def _digest(problem: Problem, params: FilesParams) -> bytes:
    """Of what the row says, so that runs with another ``system_prompt`` hold out the same rows."""
    prompt, added = problem.prompt, params.system_prompt is not None
    turns = ["user", prompt] if isinstance(prompt, str) else [t for m in prompt[added:] for t in (m.role, m.content)]
    return hashlib.md5("\0".join(turns).encode(), usedforsecurity=False).digest()
