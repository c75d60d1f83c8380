"""The verdicts of campaigns as a table, a row a kind of fault."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = Mapping[str, Any]


def read(paths: Iterable[Path]) -> list[Row]:
    """The verdicts in files of JSON lines."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def table(verdicts: Sequence[Row]) -> str:
    """Markdown: cases, what became of them, seconds (median, longest) until a worker was replaced, and until a later
    step was finished; of runs over nodes also until the fault was named, and until the run ended."""
    kinds: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for verdict in verdicts:
        if verdict["outcome"] != "not met":
            kinds[verdict["family"], verdict["backend"], verdict["fault"]].append(verdict)
    timed = ["replaced", "next_step"]
    if any(row.get("named_s") is not None for row in verdicts):
        timed = ["named", "ended", *timed]
    head = ["run", "fault", "cases", "went on", "ended, named", *(f"{t.replace('_', ' ')}, s" for t in timed), "wrong"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (family, backend, fault), rows in sorted(kinds.items()):
        counts = [sum(row["outcome"] == outcome for row in rows) for outcome in ("goes on", "ended")]
        wrong = sum(bool(row["wrong"]) for row in rows)
        times = [_times(rows, f"{key}_s") for key in timed]
        cells = [f"{family}, {backend}", fault, len(rows), *counts, *times, wrong]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _times(rows: Sequence[Row], key: str) -> str:
    seconds = [row[key] for row in rows if row.get(key) is not None]
    return f"{median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""
