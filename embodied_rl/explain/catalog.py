"""The keys of other systems and ours for the same, and their lookup. ``keys/*.yaml`` has an entry a capability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from embodied_rl.elsewhere import SYSTEMS, Entry, load_entries
from embodied_rl.errors import UserError, suggestion
from embodied_rl.explain.own import own_groups, own_keys

ALIASES: Final = {"cosmos": "cosmos_rl"}
"""Other ways to write a system's name, lower case and with underscores."""


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
