"""From what the user typed to our keys and the entries of other systems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from embodied_rl.errors import UserError, suggestion
from embodied_rl.explain.catalog import SYSTEMS, Entry
from embodied_rl.explain.own import OwnGroup, OwnKey

ALIASES = {"cosmos": "cosmos_rl"}
"""Other ways to write a system's name, lower case and with underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An entry that some system's key led to."""

    entry: Entry
    keys: Mapping[str, Sequence[str]]
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
    """All that a query means."""

    query: str
    groups: Sequence[str] = ()
    own: Sequence[str] = ()
    matches: Sequence[Match] = ()
    sections: Sequence[Section] = ()

    def __bool__(self) -> bool:
        return bool(self.groups or self.own or self.matches or self.sections)


class Index:
    """Answers queries from the entries and our own keys."""

    def __init__(
        self, entries: Iterable[Entry], own: Mapping[str, OwnKey], groups: Mapping[str, OwnGroup] | None = None
    ) -> None:
        self.entries = tuple(entries)
        self.own = own
        self.groups = groups or {}
        self.theirs: dict[str, dict[str, Entry]] = {
            system: {key: entry for entry in self.entries for key in entry.keys(system)} for system in SYSTEMS
        }
        self._free_form = {
            system: [key for entry in self.entries for key in entry.free_form(system)] for system in SYSTEMS
        }

    def equivalents(self, own_key: str) -> list[Entry]:
        """The entries that name one of our keys."""
        return [entry for entry in self.entries if own_key in entry.ours]

    def answer(self, query: str) -> Answer:
        """What ``query`` means: a key of a system or ours, in full or its last parts, or a section.

        Raises:
            UserError: nothing of that name, with the nearest there is.
        """
        text = query.partition("=")[0].lstrip("+~")
        system, key = split_system(text)
        if system:
            found = self._answer_of({system}, key, text, own=False)
        else:
            found = self._answer_of(SYSTEMS, text, text, own=True)
        if not found:
            raise UserError(self._unknown(text, system, key))
        return found

    def _answer_of(self, systems: Collection[str], key: str, query: str, *, own: bool) -> Answer:
        """Exact names first, then last parts of names, then what a free-form key takes, then sections."""
        if not key:
            return Answer(
                query=query, sections=[Section(system=s, name="", keys=list(self.theirs[s])) for s in systems]
            )
        groups = [key] if own and key in self.groups else []
        for same in (str.__eq__, lambda known, asked: known.endswith(f".{asked}")):
            ours = [known for known in self.own if same(known, key)] if own else []
            matches = self._matches({s: [known for known in self.theirs[s] if same(known, key)] for s in systems})
            if ours or matches:
                return Answer(query=query, groups=groups, own=ours, matches=matches)
        ours = [known for known, about in self.own.items() if own and about.free_form and key.startswith(f"{known}.")]
        matches = self._matches({s: [free for free in self._free_form[s] if _may_follow(free, key)] for s in systems})
        if ours or matches:
            return Answer(query=query, groups=groups, own=ours, matches=matches)
        sections = [Section(system="", name=key, keys=_below(key, self.own))] if own else []
        sections += [Section(system=s, name=key, keys=_below(key, self.theirs[s])) for s in systems]
        return Answer(query=query, groups=groups, sections=[section for section in sections if section.keys])

    def _matches(self, keys: Mapping[str, Sequence[str]]) -> list[Match]:
        grouped: dict[int, dict[str, list[str]]] = {}
        entries: dict[int, Entry] = {}
        for system, names in keys.items():
            for name in names:
                entry = self.theirs[system][name]
                entries[id(entry)] = entry
                grouped.setdefault(id(entry), {}).setdefault(system, []).append(name)
        return [Match(entry=entries[identity], keys=found) for identity, found in grouped.items()]

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
