"""What the keys of other systems are called here: one entry a capability, read from ``keys/*.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

SYSTEMS: Final = {"verl": "verl", "roll": "ROLL", "areal": "AReaL", "cosmos_rl": "Cosmos-RL", "rlinf": "RLinf"}
"""Name in the data and on the command line -> name to show."""
STATUSES: Final = {"planned": "planned", "derived": "derived", "not_needed": "not needed"}
"""Why a capability has no key of ours -> how to show it: it will get one, we compute it, or it has no use here."""
FREE_FORM: Final = ".*"
"""End of a key below which a system takes any name."""

_FIELDS: Final = frozenset(("capability", "ours", "note", "notes", *STATUSES, *SYSTEMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One capability, and its keys everywhere."""

    topic: str
    """The file it is in."""
    capability: str
    ours: tuple[str, ...]
    """Our keys or config groups; empty where ``status`` says why."""
    status: str
    """A key of :data:`STATUSES`; empty where we have keys."""
    note: str
    """What differs in meaning, unit or default; with a status, the reason. May be empty."""
    patterns: Mapping[str, tuple[str, ...]]
    """System -> its keys, braces not expanded: ``{actor,ref}.eps_clip``."""
    notes: Mapping[str, str]
    """System -> what holds for its keys alone."""

    def keys(self, system: str) -> list[str]:
        """The system's keys in full."""
        return [
            key.removesuffix(FREE_FORM) for pattern in self.patterns.get(system, ()) for key in expand_braces(pattern)
        ]

    def free_form(self, system: str) -> list[str]:
        """Those of its keys below which any name may follow."""
        patterns = [pattern for pattern in self.patterns.get(system, ()) if pattern.endswith(FREE_FORM)]
        return [key.removesuffix(FREE_FORM) for pattern in patterns for key in expand_braces(pattern)]


@cache
def load_entries() -> tuple[Entry, ...]:
    """All entries, topics in alphabetical order."""
    folder = files("embodied_rl.explain") / "keys"
    found: list[Entry] = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            topic = file.name.removesuffix(".yaml")
            found += [_entry(topic, raw) for raw in yaml.safe_load(file.read_text(encoding="utf-8"))]
    return tuple(found)


def expand_braces(pattern: str) -> list[str]:
    """As a shell does: ``{a,b}.c`` is ``a.c`` and ``b.c``."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [key for option in match[1].split(",") for key in expand_braces(head + option + tail)]


def _entry(topic: str, raw: Mapping[str, Any]) -> Entry:
    where = f"{topic}.yaml, {raw.get('capability', raw)}"
    if unknown := set(raw) - _FIELDS:
        raise ValueError(f"{where}: got {', '.join(sorted(unknown))}, expected only {', '.join(sorted(_FIELDS))}")
    kinds = list(_kinds(raw))
    if len(kinds) != 1:
        raise ValueError(f"{where}: got {kinds or 'neither'}, expected exactly one of ours, {', '.join(STATUSES)}")
    status = "" if kinds == ["ours"] else kinds[0]
    patterns = {system: tuple(str(raw[system]).split()) for system in SYSTEMS if system in raw}
    notes = dict(raw.get("notes", {}))
    if stray := set(notes) - set(patterns):
        raise ValueError(f"{where}: notes on {', '.join(sorted(stray))}, which has no key here")
    return Entry(
        topic=topic,
        capability=raw["capability"],
        ours=tuple(raw.get("ours", "").split()),
        status=status,
        note=raw[status] if status else raw.get("note", ""),
        patterns=patterns,
        notes=notes,
    )


def _kinds(raw: Mapping[str, Any]) -> Iterator[str]:
    return (kind for kind in ("ours", *STATUSES) if kind in raw)
