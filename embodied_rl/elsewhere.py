"""Other systems' keys, with ours for the same (``explain/keys/*.yaml``), and ours for a key that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

SYSTEMS: Final = {"verl": "verl", "roll": "ROLL", "areal": "AReaL", "cosmos_rl": "Cosmos-RL", "rlinf": "RLinf"}
"""Name in the data and on the command line -> name to show."""
STATUSES: Final = {"planned": "planned", "derived": "derived", "not_needed": "not needed"}
"""Reason why a capability has no key of ours (it will get one, we compute it, it has no use here) -> how to show it."""
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
    folder = files("embodied_rl") / "explain/keys"
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


_COMMON: Final = {
    "batch_size": ("actor.global_batch_size", "algorithm.n_minibatches"),
    "clip_range": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "ent_coef": ("algorithm.entropy_bonus",),
    "entropy_coef": ("algorithm.entropy_bonus",),
    "kl_coef": ("algorithm.kl_beta",),
    "learning_rate": ("actor.optim.lr",),
    "n_envs": ("env.train.total_num_envs",),
    "n_epochs": ("algorithm.update_epoch",),
    "n_steps": ("env.train.max_steps_per_rollout_epoch",),
    "num_envs": ("env.train.total_num_envs",),
    "num_episodes": ("env.eval.episodes_per_task",),
    "total_timesteps": ("runner.max_steps",),
    "vf_coef": ("algorithm.value_loss_coef",),
}
"""What Stable-Baselines3, Gymnasium and many scripts call what we have."""


def ours_for(key: str, known: Collection[str]) -> str:
    """``" That is 'x' here"`` for a key of another program, in full or its last part; empty where none is known, or
    a key of ours ends in the name of another system's.

    Args:
        known: our keys, in the run's configuration.
    """
    last = _last(key)
    found = _COMMON.get(last) or ()
    if not found and all(_last(name) != last for name in known):
        found = _of_systems(lambda name: name == key) or _of_systems(lambda name: _last(name) == last)
    there = [name for name in found if name in known]
    return f" That is {' and '.join(map(repr, there))} here (python train.py explain {there[0]})" if there else ""


def _of_systems(fits: Callable[[str], bool]) -> tuple[str, ...]:
    """Our keys for the key of a system that fits; none where several mean different things."""
    found = {e.ours for e in load_entries() if e.ours and any(fits(name) for s in SYSTEMS for name in e.keys(s))}
    return found.pop() if len(found) == 1 else ()


def _last(name: str) -> str:
    return name.rpartition(".")[2]
