"""Writes docs/algorithm_keys.md: our algorithm keys and what other systems call them.

Run it after a change of the schema or of ``embodied_rl/explain/keys/``: ``python scripts/algorithm_keys_page.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from embodied_rl.explain.catalog import STATUSES, SYSTEMS, Entry, load_entries
from embodied_rl.explain.own import own_keys

PAGE = Path(__file__).parents[1] / "docs" / "algorithm_keys.md"
SECTION = "algorithm."
TOPICS = ("algorithm", "off_policy")
"""Whose entries without a key of ours are listed, too."""
HEAD = """# Algorithm keys elsewhere

What the keys of our `algorithm` section are called in verl, ROLL, AReaL, Cosmos-RL and RLinf. Made by
`python scripts/algorithm_keys_page.py` from `embodied_rl/explain/keys/`; a test keeps it current. All other keys:
`python train.py explain <key>` ([explain](explain.md)).

`{actor,ref}.x` means `actor.x` and `ref.x`. A key that stands in two rows sets both of ours. Cells are names only; the
list below says where meaning, unit or default differs.
"""


def page() -> str:
    """The whole page."""
    entries = load_entries()
    keys = [key for key in own_keys() if key.startswith(SECTION)]
    named = [(key, [entry for entry in entries if key in entry.ours]) for key in keys]
    parts = [HEAD, *_table("ours", [(f"`{key.removeprefix(SECTION)}`", found) for key, found in named])]
    parts += ["\n## Differences\n"]
    for key, found in named:
        for entry in found:
            texts = [entry.note, *(f"{SYSTEMS[system]}: {text}" for system, text in entry.notes.items())]
            if text := " ".join(filter(None, texts)):
                parts.append(f"- `{key.removeprefix(SECTION)}`: {text}")
    parts += ["\n## Without a key here\n"]
    without = [entry for entry in entries if entry.status and entry.topic in TOPICS]
    parts += _table("capability", [(f"{e.capability} ({STATUSES[e.status]}: {_inside(e.note)})", [e]) for e in without])
    return "\n".join(parts) + "\n"


def _table(first: str, rows: Sequence[tuple[str, Sequence[Entry]]]) -> list[str]:
    lines = [f"| {' | '.join([first, *SYSTEMS.values()])} |", "|" + "---|" * (len(SYSTEMS) + 1)]
    return lines + [f"| {' | '.join([name, *(_cell(entries, s) for s in SYSTEMS)])} |" for name, entries in rows]


def _cell(entries: Iterable[Entry], system: str) -> str:
    return "<br>".join(f"`{pattern}`" for entry in entries for pattern in entry.patterns.get(system, ()))


def _inside(sentence: str) -> str:
    """A sentence as part of another."""
    text = sentence.removesuffix(".")
    first = text.partition(" ")[0]
    return text if "." in first or (first.isupper() and len(first) > 1) else text[:1].lower() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(page())
