"""The keys of other systems and ours for the same, and their lookup. ``keys/*.yaml`` has an entry a capability."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

from embodied_rl.errors import UserError, suggestion
from embodied_rl.explain.own import own_groups, own_keys

SYSTEMS: Final = {"verl": "verl", "roll": "ROLL", "areal": "AReaL", "cosmos_rl": "Cosmos-RL", "rlinf": "RLinf"}
"""Name in the data and on the command line -> name to show."""
STATUSES: Final = {"planned": "planned", "derived": "derived", "not_needed": "not needed"}
"""Reason why a capability has no key of ours (it will get one, we compute it, it has no use here) -> how to show it."""
ALIASES: Final = {"cosmos": "cosmos_rl"}
"""Other ways to write a system's name, lower case and with underscores."""
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
    """The difference in meaning, unit or default; with a status, the reason. May be empty."""
    patterns: Mapping[str, tuple[str, ...]]
    """System -> its keys, braces not expanded: ``{actor,ref}.eps_clip``."""
    notes: Mapping[str, str]
    """System -> a remark on its keys alone."""

    def keys(self, system: str, *, free_form: bool = False) -> list[str]:
        """The system's keys in full; with ``free_form`` those alone below which any name may follow."""
        patterns = [p for p in self.patterns.get(system, ()) if p.endswith(FREE_FORM) or not free_form]
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
    kinds = [kind for kind in ("ours", *STATUSES) if kind in raw]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An entry that some system's key led to."""

    entry: Entry
    keys: dict[str, list[str]]
    """System -> those of its keys that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys below a name that has none of its own."""

    system: str
    """Empty: ours."""
    name: str
    """Empty: all of the system's."""
    keys: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that a query means."""

    groups: Sequence[str] = ()
    own: Sequence[str] = ()
    matches: Sequence[Match] = ()
    sections: Sequence[Section] = ()

    def __bool__(self) -> bool:
        return bool(self.groups or self.own or self.matches or self.sections)


class Index:
    """Answers queries from the entries and our own keys."""

    def __init__(self) -> None:
        self.entries, self.own, self.groups = load_entries(), own_keys(), own_groups()
        self.theirs = {system: {key: e for e in self.entries for key in e.keys(system)} for system in SYSTEMS}
        """System -> key -> its entry."""
        self._known: dict[str, Collection[str]] = {"": self.own, **self.theirs}
        self._free_form = {s: {key for e in self.entries for key in e.keys(s, free_form=True)} for s in SYSTEMS}
        self._free_form[""] = {key for key, about in self.own.items() if about.free_form}

    def equivalents(self, own_key: str) -> list[Entry]:
        """The entries that name one of our keys."""
        return [entry for entry in self.entries if own_key in entry.ours]

    def answer(self, query: str) -> Answer:
        """The meaning of a key of a system or ours, in full or its last parts, or of a section.

        Raises:
            UserError: nothing of that name, with the nearest there is.
        """
        text = query.partition("=")[0].lstrip("+~")
        system, key = split_system(text)
        found = self._answer_of([system] if system else ["", *SYSTEMS], key)
        if not found:
            raise UserError(self._unknown(text, system, key))
        return found

    def _answer_of(self, systems: Sequence[str], key: str) -> Answer:
        """Exact names first, then last parts of names, then what a free-form key takes, then sections.

        Args:
            systems: those that are asked; "" is us.
        """
        if not key:
            return Answer(sections=[Section(system=s, name="", keys=list(self._known[s])) for s in systems])
        groups = [key] if "" in systems and key in self.groups else []
        rules: list[Callable[[str, str], bool]] = [
            lambda _, known: known == key,
            lambda _, known: known.endswith(f".{key}"),
            lambda system, known: known in self._free_form[system] and _may_follow(known, key),
        ]
        for rule in rules:
            keys = {s: [known for known in self._known[s] if rule(s, known)] for s in systems}
            if any(keys.values()):
                return Answer(groups=groups, own=keys.pop("", []), matches=self._matches(keys))
        sections = [Section(system=s, name=key, keys=_below(key, self._known[s])) for s in systems]
        return Answer(groups=groups, sections=[section for section in sections if section.keys])

    def _matches(self, keys: Mapping[str, Sequence[str]]) -> list[Match]:
        """The entries that ``keys`` (system -> some of its keys) lead to, each once."""
        found: dict[int, Match] = {}
        for system, names in keys.items():
            for name in names:
                entry = self.theirs[system][name]
                match = found.setdefault(id(entry), Match(entry=entry, keys={}))
                match.keys.setdefault(system, []).append(name)
        return list(found.values())

    def _unknown(self, text: str, system: str, key: str) -> str:
        if system:
            near = _nearest(key, self.theirs[system], f"{text.partition('.')[0]}.")
            return f"{text}: {SYSTEMS[system]} has no such key in its reference.{near}"
        known = {name for keys in self.theirs.values() for name in keys}
        near = _nearest(key, [*self.own, *self.groups, *sorted(known)], "")
        return f"{text}: no such key, neither ours nor of {', '.join(SYSTEMS.values())}.{near}"


def split_system(text: str) -> tuple[str, str]:
    """``verl.actor.clip_ratio`` -> ("verl", "actor.clip_ratio"); no system is ""."""
    first, _, rest = text.partition(".")
    name = first.lower().replace("-", "_")
    name = ALIASES.get(name, name)
    return (name, rest) if name in SYSTEMS else ("", text)


def _nearest(key: str, known: Iterable[str], prefix: str) -> str:
    """The suggestion, written with as many parts as the user wrote."""
    parts = key.count(".") + 1
    names = list(known)
    short = [".".join(name.split(".")[-parts:]) for name in names]
    return suggestion(prefix + key, [prefix + name for name in dict.fromkeys([*short, *names])])


def _below(key: str, known: Iterable[str]) -> list[str]:
    """The keys of the section ``key``, itself in full or its last parts."""
    return [name for name in known if name.startswith(f"{key}.") or f".{key}." in name]


def _may_follow(free: str, key: str) -> bool:
    """Whether ``key`` is ``free``, in full or its last parts, and a name below."""
    parts = free.split(".")
    return any(key.startswith(".".join(parts[start:]) + ".") for start in range(len(parts)))
