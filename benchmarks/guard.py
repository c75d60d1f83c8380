"""What ours reached against others, and whether it still does.

Each benchmark of ``python -m benchmarks`` says in ``compared`` how much better ours is than what it is compared with in
the same run: 2 is twice as fast. Such ratios depend on the machine less than seconds do. ``benchmarks/ratios.json`` has
those of the last release.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

from rich.table import Table

RECORD: Final = Path(__file__).with_name("ratios.json")
ALLOWED: Final = 0.25
"""A ratio may be lower by that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    ratio: float
    date: str
    machine: str
    quick: bool
    """Of few rounds."""


Ratios: TypeAlias = Mapping[str, Ratio]
"""``<benchmark>: <what by what>`` -> a ratio."""


def measured(files: Iterable[Path], *, quick: bool) -> Ratios:
    """Of the JSON files, ``<benchmark>.json``, that benchmarks have just written. One that is missing says nothing."""
    found: dict[str, Ratio] = {}
    for path in files:
        if not path.exists():
            continue
        compared = importlib.import_module(f"benchmarks.{path.stem}").compared(json.loads(path.read_text()))
        for what, ratio in compared.items():
            found[f"{path.stem}: {what}"] = Ratio(
                ratio=round(ratio, 3), date=datetime.now(UTC).date().isoformat(), machine=machine(), quick=quick
            )
    return found


def read(path: Path) -> Ratios:
    return {what: Ratio(**row) for what, row in json.loads(path.read_text()).items()}


def write(path: Path, ratios: Ratios) -> None:
    path.write_text(json.dumps({what: asdict(row) for what, row in ratios.items()}, indent=2) + "\n")


def worse(now: Ratios, before: Ratios) -> list[str]:
    """What both have, and now is lower than allowed."""
    return [what for what, row in now.items() if what in before and row.ratio < (1 - ALLOWED) * before[what].ratio]


def machine() -> str:
    """The processor's name and the number of cores."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(": ")[2] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores"


def show(now: Ratios, before: Ratios) -> Table:
    lost, nothing = worse(now, before), Ratio(ratio=float("nan"), date="", machine="", quick=False)
    table = Table(title=f"how much better ours is: 2 is twice as fast. Now: {machine()}")
    for column in ("", "at the last release", "on", "of", "now", ""):
        table.add_column(column, justify="right" if "now" in column or "at" in column else "left")
    for what, row in now.items():
        then = before.get(what, nothing)
        old = f"{then.ratio:.2f}" if then.date else ""
        table.add_row(what, old, then.date, then.machine, f"{row.ratio:.2f}", "worse" if what in lost else "")
    return table
