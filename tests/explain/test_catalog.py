"""The data is whole: our keys exist, no key is listed twice, none is lost."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields

import pytest
import yaml

from embodied_rl.composition import FREE_FORM
from embodied_rl.config import GROUPS
from embodied_rl.elsewhere import STATUSES, SYSTEMS, _entry, expand_braces, load_entries
from embodied_rl.envs.base import ADAPTERS, adapter_class
from embodied_rl.models.registry import MODELS, policy_class
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.validation import known_keys

COUNTS = {"verl": 235, "roll": 159, "areal": 654, "cosmos_rl": 162, "rlinf": 289}
"""Keys of each system. More is welcome; fewer means that someone's key is no longer answered."""


def test_every_key_of_ours_exists() -> None:
    known = {key for task in TASKS.values() for key in known_keys(task.config)} | set(GROUPS)
    unknown = {(entry.capability, key) for entry in load_entries() for key in entry.ours if key not in known}
    assert not unknown


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_key_is_listed_twice(system: str) -> None:
    counts = Counter(key for entry in load_entries() for key in entry.keys(system))
    assert not [key for key, count in counts.items() if count > 1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_key_is_lost(system: str) -> None:
    assert sum(len(entry.keys(system)) for entry in load_entries()) >= COUNTS[system]


def test_no_capability_is_listed_twice() -> None:
    counts = Counter(entry.capability for entry in load_entries())
    assert not [capability for capability, count in counts.items() if count > 1]


def test_every_entry_says_something() -> None:
    for entry in load_entries():
        assert bool(entry.ours) != bool(entry.status), entry.capability
        assert all(entry.patterns.values()), entry.capability
        assert entry.patterns or entry.note, entry.capability
        if entry.status:
            assert entry.status in STATUSES
        for sentence in filter(None, (entry.note, *entry.notes.values())):
            assert sentence.endswith("."), f"{entry.capability}: {sentence}"


def test_notes_name_only_keys_of_ours_that_exist() -> None:
    """A note that sends the user to a key which is no more would be worse than none."""
    known = {key for task in TASKS.values() for key in known_keys(task.config)}
    sections = {key.partition(".")[0] for key in known}
    for entry in load_entries():
        for word in re.split(r"[\s()]", entry.note):
            key = word.strip(".,;:").partition("=")[0]
            if "." in key and key.partition(".")[0] in sections and not key.startswith(FREE_FORM):
                assert key in known, f"{entry.capability}: {key}"


OPTIONS = {
    "env.init_params": {f.name for name in ADAPTERS for f in fields(adapter_class(name).Params)},
    "model.params": {f.name for name in MODELS for f in fields(policy_class(name).Params)},
}
"""Free-form section -> the options of all who read it."""


def test_notes_name_only_options_that_exist() -> None:
    named = [
        match
        for entry in load_entries()
        for match in re.findall(r"(env\.init_params|model\.params)\.(\w+)", entry.note)
    ]
    assert {"center_crop", "camera_heights"} <= {option for _, option in named}
    assert not [f"{section}.{option}" for section, option in named if option not in OPTIONS[section]]


def test_what_is_planned_does_not_exist() -> None:
    """A key of the same section and name, or a model's option, would be it."""
    ours = {".".join(key.split(".")[-2:]) for task in TASKS.values() for key in known_keys(task.config) if "." in key}
    for entry in load_entries():
        if entry.status == "planned":
            for key in (key for system in SYSTEMS for key in entry.keys(system)):
                assert ".".join(key.split(".")[-2:]) not in ours, f"{entry.capability}: {key}"
                assert key.split(".")[-1] not in OPTIONS["model.params"], f"{entry.capability}: {key}"
            assert not re.search(r"\b[Cc]omes? (with|later)\b", entry.note), (
                f"{entry.capability}: stale once that is there"
            )


def test_braces_expand_as_in_a_shell() -> None:
    assert expand_braces("a.b") == ["a.b"]
    assert expand_braces("{a,b}.c") == ["a.c", "b.c"]
    assert expand_braces("{a,b}.{c,d}") == ["a.c", "a.d", "b.c", "b.d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{capability: x, verl: a.b}", "got neither, expected exactly one of ours"),
        ("{capability: x, ours: a, planned: Soon., verl: a.b}", "expected exactly one of ours"),
        ("{capability: x, ours: a, vrel: a.b}", "got vrel"),
        ("{capability: x, ours: a, verl: a.b, notes: {roll: Differs.}}", "notes on roll"),
    ],
)
def test_malformed_entries_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _entry("topic", yaml.safe_load(text))
