"""Evaluations held against a first one: whether they asked the same, and by how much they differ."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from embodied_rl.envs.base import default_params, params_of_the_machine
from embodied_rl.errors import UserError, suggestion
from embodied_rl.evaluation.eval_file import COMPLETIONS, EPISODES, SavedEvaluation
from embodied_rl.evaluation.paired import Differences, Estimate, Pairs, differences, mcnemar

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    EPISODES: (
        "env_type",
        "max_episode_steps",
        "ignore_terminations",
        "temperature",
        "top_p",
        "top_k",
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
"""Kind -> the keys of ``meta`` that have to be equal; those of a section each."""
_NOTED: Final = tuple(
    f"versions.{name}" for name in ("python", "embodied_rl", "torch", "numpy", "transformers", "vllm")
)
"""Versions of what computes the policy; those of simulators and of reward functions have to be equal."""
ASKED: Final[Mapping[str, str]] = {EPISODES: "episodes", COMPLETIONS: "prompts"}
"""Kind -> its questions, and the key under which another set of them is allowed."""
_INSTRUCTIONS: Final = "instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy, or several that were trained alike with other seeds."""

    name: str
    runs: tuple[SavedEvaluation, ...]


def check_comparable(evaluations: Sequence[SavedEvaluation], allowed: Collection[str] = ()) -> list[str]:
    """Refuse evaluations that cannot be compared; returns what differs nevertheless and should be known, in words.

    Args:
        evaluations: each is held against the first.
        allowed: keys that may differ; that of a section stands for all of its keys.

    Raises:
        UserError: with every difference and its key, or an allowed key that does not exist.
    """
    first = evaluations[0]
    kind = first.kind
    refused: dict[str, set[str]] = {}
    notes: list[str] = []
    for other in evaluations[1:]:
        if other.kind != kind:
            raise UserError(
                f"{first.name} ({first.path}) lists {kind}, {other.name} ({other.path}) "
                f"{other.kind}: they cannot be compared"
            )
        for key, text in [*_other_conditions(first, other), *_other_questions(first, other)]:
            line = f"{key}: {text} ({first.name} and {other.name})"
            if key in _NOTED or key in allowed or key.split(".")[0] in allowed:
                notes.append(line)
            else:
                refused.setdefault(key, set()).add(line)
    _check_allowed(allowed, kind, evaluations)
    if refused:
        lines = "\n".join(f"  - {line}" for key in refused for line in sorted(refused[key]))
        options = " ".join(f"--allow {key}" for key in refused)
        raise UserError(
            f"these evaluations cannot be compared:\n{lines}\nEvaluate again under the same conditions; or, to compare "
            f"what differs in this, say so: {options}"
        )
    return notes


def _other_conditions(first: SavedEvaluation, other: SavedEvaluation) -> Iterator[tuple[str, str]]:
    """Each key that differs, and what both have."""
    left, right = _conditions(first), _conditions(other)
    if left.get("env_type") == right.get("env_type"):
        # A parameter that is newer than a report had its default there.
        defaults = {f"init_params.{name}": value for name, value in default_params(str(left.get("env_type"))).items()}
        for found, missing in ((left, right.keys() - left.keys()), (right, left.keys() - right.keys())):
            found |= {key: defaults[key] for key in missing & defaults.keys()}
    free = {f"init_params.{name}" for name in params_of_the_machine(str(left.get("env_type")))}
    for key in dict.fromkeys([*left, *right]):
        same = key in left and key in right and left[key] == right[key]
        if not same and key not in free:
            one, two = (repr(found[key]) if key in found else "nothing" for found in (left, right))
            yield key, f"{one} and {two}"


def _conditions(evaluation: SavedEvaluation) -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for key in _KEYS[evaluation.kind]:
        value = evaluation.meta.get(key)
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": part for name, part in value.items()}
        elif key in evaluation.meta:
            found[key] = value
    if found.get("init_params.success_return") is not None:  # the return decides what a success is
        found["use_rel_reward"] = evaluation.meta.get("use_rel_reward")
    return found


def _other_questions(first: SavedEvaluation, other: SavedEvaluation) -> Iterator[tuple[str, str]]:
    """As :func:`_other_conditions`, of the episodes or prompts."""
    left, right = first.outcomes, other.outcomes
    what = ASKED[first.kind]
    both = left.keys() & right.keys()
    if len(both) < max(len(left), len(right)):
        if not both:
            raise UserError(
                f"{first.name} ({first.path}) and {other.name} ({other.path}) have none of their "
                f"{what} in common, so there is nothing to compare"
            )
        yield what, f"{len(left)} and {len(right)}, of which {len(both)} are the same"
    if first.kind == EPISODES:
        reworded = sum(left[key].label != right[key].label for key in both)
        if reworded:
            yield _INSTRUCTIONS, f"{reworded} of {len(both)} episodes have another instruction"


def _check_allowed(allowed: Collection[str], kind: str, evaluations: Sequence[SavedEvaluation]) -> None:
    known = {*_KEYS[kind], ASKED[kind], *([_INSTRUCTIONS] if kind == EPISODES else [])}
    known |= {key for evaluation in evaluations for key in _conditions(evaluation)}
    for key in allowed:
        if key not in known:
            raise UserError(
                f"--allow {key}: nothing of that name is compared.{suggestion(key, known)} Expected one of "
                f"{', '.join(sorted(known))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Two recipes in one task, or in all."""

    task: int | str | None
    """Task id or source; None: all."""
    label: str
    pairs: int
    """Episodes or prompts."""
    first: float
    """Success rate or accuracy, in [0, 1]."""
    second: float
    change: Estimate
    """Second less first, in success rate."""
    won: int | None
    """Pairs in which only the second succeeded. This, ``lost`` and ``p`` are None for recipes of several runs, and
    where a prompt had several completions."""
    lost: int | None
    p: float | None
    """McNemar's exact test, two-sided; not corrected for the number of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two recipes, task by task and over all tasks."""

    first: Recipe
    second: Recipe
    tasks: tuple[Row, ...]
    overall: Row
    differences: Differences
    left_out: int
    """Prompts without a verified completion in some evaluation."""

    @property
    def several_runs(self) -> bool:
        return max(len(self.first.runs), len(self.second.runs)) > 1


def compare(first: Recipe, second: Recipe) -> Comparison:
    """Compare recipes whose evaluations :func:`check_comparable` has let pass, on what all of them were asked.

    Raises:
        UserError: nothing of that was verified in all of them.
    """
    runs = (*first.runs, *second.runs)
    shared = [key for key in runs[0].outcomes if all(key in run.outcomes for run in runs)]
    scored = [key for key in shared if all(run.outcomes[key].score is not None for run in runs)]
    if not scored:
        raise UserError(
            f"{first.name} and {second.name}: no prompt has a verified completion in all evaluations, so there is "
            "nothing to compare"
        )
    tasks: dict[int | str, list[Hashable]] = {}
    for key in scored:
        tasks.setdefault(runs[0].outcomes[key].task, []).append(key)
    pairs = [Pairs(first=_scores(first, keys), second=_scores(second, keys)) for keys in tasks.values()]
    # Shares of several completions may all be 0 or 1 by chance, and in one source alone.
    tested = len(runs) == 2 and all(run.meta.get("completions_per_prompt", 1) == 1 for run in runs)
    found = differences(pairs)
    rows = [
        _row(task, runs[0].outcomes[keys[0]].label, part, estimate, tested=tested)  # of paraphrases the first
        for (task, keys), part, estimate in zip(tasks.items(), pairs, found.tasks, strict=True)
    ]
    everything = Pairs(first=_scores(first, scored), second=_scores(second, scored))
    return Comparison(
        first=first,
        second=second,
        tasks=tuple(rows),
        overall=_row(None, "all", everything, found.mean, tested=tested),
        differences=found,
        left_out=len(shared) - len(scored),
    )


def _scores(recipe: Recipe, keys: Sequence[Hashable]) -> np.ndarray:
    return np.array([[run.outcomes[key].score for key in keys] for run in recipe.runs], dtype=np.float64)


def _row(task: int | str | None, label: str, pairs: Pairs, change: Estimate, *, tested: bool) -> Row:
    won = lost = p = None
    if tested:
        won, lost = int((pairs.second > pairs.first).sum()), int((pairs.second < pairs.first).sum())
        p = mcnemar(won, lost)
    return Row(
        task=task,
        label=label,
        pairs=pairs.first.shape[1],
        first=float(pairs.first.mean()),
        second=float(pairs.second.mean()),
        change=change,
        won=won,
        lost=lost,
        p=p,
    )
