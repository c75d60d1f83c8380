"""``python train.py explain <key>``: a config key of another system gets ours, and one of ours gets theirs.

``keys/*.yaml`` has the data, an entry a capability; ``catalog.py`` reads it and finds, ``own.py`` describes our own
keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from embodied_rl.commands.terminal import console
from embodied_rl.elsewhere import STATUSES, SYSTEMS, Entry
from embodied_rl.explain.catalog import Answer, Index, Match, Section
from embodied_rl.explain.own import OwnGroup, OwnKey

EXAMPLES: Final = (
    ("verl.actor.clip_ratio", "a key of one system, in full or its last parts"),
    ("actor_rollout_ref.actor.clip_ratio", "a key of any system"),
    ("algorithm.clip_ratio_low", "a key of ours, and what it is called elsewhere"),
    ("rlinf.env.train", "a section: all its keys"),
    ("verl", "all keys of a system"),
)


def main(arguments: Sequence[str]) -> None:
    """Explain each of ``arguments``, or say how to ask.

    Raises:
        UserError: a key that neither we nor any of the systems have, with the nearest that exists.
    """
    queries = [argument for argument in arguments if argument not in ("-h", "--help")]
    index = Index()
    output = console()
    if not queries:
        show_usage(output, index)
    for answer in [index.answer(query) for query in queries]:
        show_answer(output, index, answer)


def show_usage(output: Console, index: Index) -> None:
    """Print examples of queries, and the number of known keys."""
    output.print("Says what a configuration key of verl, ROLL, AReaL, Cosmos-RL or RLinf is called here, and back.\n")
    examples = Table.grid(padding=(0, 2))
    for query, meaning in EXAMPLES:
        examples.add_row(Text(f"  python train.py explain {query}"), Text(meaning, style="dim"))
    output.print(examples)
    counts = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("system", "keys", "ours", *STATUSES.values()):
        counts.add_column(heading, justify="left" if heading == "system" else "right")
    for system, name in SYSTEMS.items():
        kinds = Counter(entry.status for entry in index.theirs[system].values())
        cells = (len(index.theirs[system]), kinds[""], *(kinds[status] for status in STATUSES))
        counts.add_row(name, *map(str, cells))
    output.print()
    output.print(counts)


def show_answer(output: Console, index: Index, answer: Answer) -> None:
    """Print our keys that were asked for, then those of other systems, then sections."""
    for name in (*answer.groups, *answer.own):
        group = name in answer.groups
        output.print(Text(f"{name}  (ours, a config group)" if group else f"{name}  (ours)", style="bold"))
        output.print(_own_table([index.groups[name] if group else index.own[name]]))
        _show_elsewhere(output, index.equivalents(name))
        output.print()
    said = [entry for key in (*answer.groups, *answer.own) for entry in index.equivalents(key)]
    for match in answer.matches:
        if match.entry not in said:
            _show_match(output, index, match)
    for section in answer.sections:
        _show_section(output, index, section)


def _show_match(output: Console, index: Index, match: Match) -> None:
    entry = match.entry
    for system, keys in match.keys.items():
        for key in keys:
            output.print(Text(f"{SYSTEMS[system]}: {key}", style="bold"))
    output.print(Text(f"  {entry.capability}", style="dim"))
    if entry.status:
        output.print(_facts([(STATUSES[entry.status], entry.note)]))
    else:
        output.print(
            _own_table([index.groups[name] if name in index.groups else index.own[name] for name in entry.ours])
        )
        output.print(_facts([("note", entry.note)]))
    output.print(_facts((SYSTEMS[system], entry.notes.get(system, "")) for system in match.keys))
    others = [
        f"{SYSTEMS[system]} {' '.join(patterns)}"
        for system, patterns in entry.patterns.items()
        if system not in match.keys
    ]
    output.print(_facts([("also", "; ".join(others))]), style="dim")
    output.print()


def _own_table(keys: Iterable[OwnKey | OwnGroup]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  ours", no_wrap=True, overflow="fold")
    table.add_column("default", overflow="fold", max_width=32)
    table.add_column("type", overflow="fold", max_width=32)
    table.add_column("")
    for about in keys:
        if isinstance(about, OwnGroup):
            row = (f"{about.name}=", about.default, "config group", f"One of {', '.join(about.choices)}.")
        else:
            presets = ", ".join(f"{name} {value}" for name, value in about.presets.items())
            text = " ".join(part for part in (about.text.replace("``", ""), presets and f"Presets: {presets}.") if part)
            row = (about.key, default_text(about), about.kind, text)
        name, *rest = row
        table.add_row(Text(f"  {name}", style="cyan"), *map(Text, rest))
    return table


def default_text(about: OwnKey) -> str:
    """One value, or one for each task where they differ."""
    values = list(dict.fromkeys(about.defaults.values()))
    if len(values) == 1:
        return values[0]
    return ", ".join(f"{value} ({task})" for task, value in about.defaults.items())


def _show_elsewhere(output: Console, entries: Sequence[Entry]) -> None:
    with_notes = [entry for entry in entries if entry.note]
    output.print(_facts(("note", f"{e.capability}: {e.note}" if with_notes[1:] else e.note) for e in with_notes))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  elsewhere", no_wrap=True)
    table.add_column("key", no_wrap=True, overflow="fold")
    table.add_column("note")
    for system, name in SYSTEMS.items():
        for entry in entries:
            if patterns := entry.patterns.get(system):
                table.add_row(Text(f"  {name}"), Text("\n".join(patterns)), Text(entry.notes.get(system, "")))
    if table.row_count:
        output.print(table)
    if missing := [name for system, name in SYSTEMS.items() if not any(system in e.patterns for e in entries)]:
        output.print(_facts([("none in", ", ".join(missing))]), style="dim")


def _show_section(output: Console, index: Index, section: Section) -> None:
    owner = SYSTEMS.get(section.system, "ours")
    count = "1 key" if len(section.keys) == 1 else f"{len(section.keys)} keys"
    output.print(Text(f"{owner}: {section.name or 'everything'}  ({count})", style="bold"))
    if not section.system:
        output.print(_own_table([index.own[key] for key in section.keys]))
        output.print()
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(f"  {owner}", no_wrap=True, overflow="fold")
    table.add_column("ours, or why not", overflow="fold")
    for key in section.keys:
        entry = index.theirs[section.system][key]
        ours = Text("\n".join(entry.ours), style="cyan")
        table.add_row(Text(f"  {key}"), Text(f"{STATUSES[entry.status]}: {entry.note}") if entry.status else ours)
    output.print(table)
    output.print()


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Name and sentence, those without a sentence left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=10)
    for name, text in rows:
        if text:
            table.add_row(Text(f"  {name}", style="dim"), Text(text))
    return table
