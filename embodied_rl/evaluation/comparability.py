"""Whether two evaluations asked the same of their policies. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from embodied_rl.errors import UserError, suggestion
from embodied_rl.evaluation.eval_file import COMPLETIONS, EPISODES, SavedEvaluation

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    EPISODES: (
        "env_type",
        "max_episode_steps",
        "ignore_terminations",
        "temperature",
        "num_action_chunks",
        "cameras",
        "init_params",
        "versions",
    ),
    COMPLETIONS: (
        "reward",
        "reward_params",
        "success_threshold",
        "max_prompt_length",
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "temperature",
        "completions_per_prompt",
        "versions",
    ),
}
"""Of ``meta``: what has to be equal. Of a section, each of its keys."""
_WITHOUT_EFFECT: Final = ("init_params.max_cached_scenes", "init_params.render_height", "init_params.render_width")
"""They change a simulator's speed, or its videos."""
_NOTED: Final = ("python", "embodied_rl", "torch", "numpy", "transformers", "vllm")
"""Versions of what computes the policy; those of simulators and of reward functions have to be equal."""
ASKED: Final[Mapping[str, str]] = {EPISODES: "episodes", COMPLETIONS: "prompts"}
"""By kind: what was asked, and the key under which another set of them is allowed."""
INSTRUCTIONS: Final = "instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two evaluations do not share."""

    key: str
    text: str
    """What each has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An evaluation and what it is called in messages."""

    name: str
    evaluation: SavedEvaluation


def check_comparable(evaluations: Sequence[Named], allowed: Collection[str] = ()) -> list[str]:
    """Refuse evaluations that cannot be compared; returns what differs nevertheless and should be known, in words.

    Args:
        evaluations: each is held against the first.
        allowed: keys that may differ; that of a section stands for all of its keys.

    Raises:
        UserError: with every difference and its key, or an allowed key that does not exist.
    """
    first = evaluations[0]
    kind = first.evaluation.kind
    refused: dict[str, set[str]] = {}
    notes: list[str] = []
    for other in evaluations[1:]:
        if other.evaluation.kind != kind:
            raise UserError(
                f"{first.name} ({first.evaluation.path}) lists {kind}, {other.name} ({other.evaluation.path}) "
                f"{other.evaluation.kind}: they cannot be compared"
            )
        pair = f"{first.name} and {other.name}"
        for difference in [*_other_conditions(first, other), *_other_questions(first, other)]:
            line = f"{difference.key}: {difference.text} ({pair})"
            if _may_differ(difference.key, allowed):
                notes.append(line)
            else:
                refused.setdefault(difference.key, set()).add(line)
        notes += [f"{d.key}: {d.text} ({pair})" for d in _noted(first, other)]
    _check_allowed(allowed, kind, evaluations)
    if refused:
        lines = "\n".join(f"  - {line}" for key in refused for line in sorted(refused[key]))
        options = " ".join(f"--allow {key}" for key in refused)
        raise UserError(
            f"these evaluations cannot be compared:\n{lines}\nEvaluate again under the same conditions; or, to compare "
            f"what differs in this, say so: {options}"
        )
    return notes


def _other_conditions(first: Named, other: Named) -> Iterator[Difference]:
    for key, left, right in _unequal(first, other):
        if key not in _WITHOUT_EFFECT and key not in {f"versions.{name}" for name in _NOTED}:
            yield Difference(key=key, text=f"{left} and {right}")


def _noted(first: Named, other: Named) -> Iterator[Difference]:
    for key, left, right in _unequal(first, other):
        if key in {f"versions.{name}" for name in _NOTED}:
            yield Difference(key=key, text=f"{left} and {right}")


def _unequal(first: Named, other: Named) -> Iterator[tuple[str, str, str]]:
    left, right = _conditions(first.evaluation), _conditions(other.evaluation)
    for key in dict.fromkeys([*left, *right]):
        if left.get(key, _Nothing) != right.get(key, _Nothing):
            yield key, _word(left, key), _word(right, key)


class _Nothing:
    pass


def _word(conditions: Mapping[str, Any], key: str) -> str:
    return repr(conditions[key]) if key in conditions else "nothing"


def _conditions(evaluation: SavedEvaluation) -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for key in _KEYS[evaluation.kind]:
        value = evaluation.meta.get(key, _Nothing)
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": part for name, part in value.items()}
        elif value is not _Nothing:
            found[key] = value
    return found


def _other_questions(first: Named, other: Named) -> Iterator[Difference]:
    left, right = first.evaluation.outcomes, other.evaluation.outcomes
    what = ASKED[first.evaluation.kind]
    both = left.keys() & right.keys()
    if len(both) < max(len(left), len(right)):
        if not both:
            raise UserError(
                f"{first.name} ({first.evaluation.path}) and {other.name} ({other.evaluation.path}) have none of their "
                f"{what} in common, so there is nothing to compare"
            )
        yield Difference(key=what, text=f"{len(left)} and {len(right)}, of which {len(both)} are the same")
    if first.evaluation.kind == EPISODES:
        told = sum(left[key].label != right[key].label for key in both)
        if told:
            yield Difference(key=INSTRUCTIONS, text=f"{told} of {len(both)} episodes have another instruction")


def _may_differ(key: str, allowed: Collection[str]) -> bool:
    return key in allowed or key.split(".")[0] in allowed


def _check_allowed(allowed: Collection[str], kind: str, evaluations: Sequence[Named]) -> None:
    known = {*_KEYS[kind], ASKED[kind], *([INSTRUCTIONS] if kind == EPISODES else [])}
    known |= {key for named in evaluations for key in _conditions(named.evaluation)}
    for key in allowed:
        if key not in known:
            raise UserError(
                f"--allow {key}: nothing of that name is compared.{suggestion(key, known)} Expected one of "
                f"{', '.join(sorted(known))}"
            )
