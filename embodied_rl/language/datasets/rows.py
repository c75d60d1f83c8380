"""Rows of JSON, JSONL, CSV and parquet files, each with its file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_rl.errors import UserError, first_line, suggestion

EXTENSIONS = (".json", ".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a file."""

    where: str
    """File and line (JSONL, CSV) or row (JSON, parquet), from 1, for messages."""
    columns: dict[str, Any]

    def column(self, name: str, key: str) -> Any:
        """The value of a column; ``outer.inner`` reaches into one that holds objects.

        Args:
            key: the option that named it, for messages.

        Raises:
            UserError: there is no such column.
        """
        value: Any = self.columns
        for part in [name] if name in self.columns else name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise UserError(
                    f"{self.where}: no column {name!r}, but {', '.join(map(str, self.columns)) or 'none'}; set "
                    f"data.params.{key} to one of them.{suggestion(name, map(str, self.columns))}"
                )
            value = value[part]
        return value


def path_problem(path: str) -> str | None:
    """Why the file cannot be read, as far as its name and its existence say; None: nothing known against it."""
    if Path(path).suffix not in EXTENSIONS:
        return f"{path}: got the extension {Path(path).suffix!r}, expected one of {', '.join(EXTENSIONS)}"
    if not Path(path).is_file():
        return f"{path}: no such file; a relative path starts at {Path.cwd()}"
    return None


def read_rows(path: str) -> list[Row]:
    """All rows of a file, by its extension.

    Raises:
        UserError: it is missing, empty, or not what its extension says.
    """
    if problem := path_problem(path):
        raise UserError(problem)
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    try:
        rows = list(readers[Path(path).suffix](path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    if not rows:
        raise UserError(f"{path}: the file has no rows; leave it out, or check what wrote it")
    return rows


def _json(path: str) -> Iterator[Row]:
    text = Path(path).read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply; expected a list of objects, one a row") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); correct it, or name the file .jsonl if each line is "
            "an object"
        ) from error
    if not isinstance(content, list):
        raise UserError(f"{path}: got {_kind(content)}, expected a list of objects, one a row")
    for number, value in enumerate(content, 1):
        yield _row(f"{path}, row {number}", value)


def _jsonl(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = getattr(error, "msg", "nested too deeply")
                raise UserError(f"{where}: not JSON ({reason}): {line.strip()[:80]!r}; correct or remove it") from error
            yield _row(where, value)


def _csv(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                if not fields:
                    continue
                if len(fields) != len(names):
                    raise UserError(
                        f"{where}: {len(fields)} fields, expected the {len(names)} of the first line "
                        f"({', '.join(names)}); quote fields that hold commas"
                    )
                yield Row(where=where, columns=dict(zip(names, fields, strict=True)))
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: not CSV ({error}); correct it") from error


def _parquet(path: str) -> Iterator[Row]:
    from pyarrow import parquet  # here: a check of the configuration does without

    try:
        values = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise UserError(f"{path}: not a parquet file ({first_line(error)}); check what wrote it") from error
    for number, value in enumerate(values, 1):
        yield Row(where=f"{path}, row {number}", columns=value)


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: got {_kind(value)}, expected an object with the columns' names and values")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(f"{where}: {half!r} is half of a character (a lone surrogate); correct or remove it") from error
    return Row(where=where, columns=value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
