"""Recipes against a first one, on the same episodes or prompts. No torch here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparability import ASKED, Named
from embodied_rl.evaluation.eval_file import SavedEvaluation
from embodied_rl.evaluation.paired import (
    CONFIDENCE,
    RESAMPLES,
    SEED,
    Differences,
    Estimate,
    Pairs,
    differences,
    mcnemar,
)

REPORT_VERSION: Final = 1
"""Of the JSON report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy, or several that were trained alike with other seeds."""

    name: str
    runs: tuple[SavedEvaluation, ...]

    @property
    def named(self) -> list[Named]:
        """Its evaluations with names for messages."""
        single = len(self.runs) == 1
        return [
            Named(name=self.name if single else f"{self.name}[{place}]", evaluation=run)
            for place, run in enumerate(self.runs)
        ]


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
    won: int | None
    """Pairs in which only the second succeeded. This, ``lost`` and ``p`` are None for recipes of several runs, and
    where a prompt had several completions."""
    lost: int | None
    difference: Estimate
    """Second less first, in success rate."""
    p: float | None
    """McNemar's exact test, two-sided; not corrected for the number of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two recipes differ in."""

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


def compare(first: Recipe, second: Recipe, *, resamples: int = RESAMPLES, seed: int = SEED) -> Comparison:
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
    tasks: dict[tuple[int | str, str], list[Hashable]] = {}
    labels: dict[int | str, str] = {}
    for key in scored:
        outcome = runs[0].outcomes[key]
        label = labels.setdefault(outcome.task, outcome.label)  # Of paraphrases the first.
        tasks.setdefault((outcome.task, label), []).append(key)
    pairs = [Pairs(first=_outcomes(first, keys), second=_outcomes(second, keys)) for keys in tasks.values()]
    # Shares of several completions may all be 0 or 1 by chance, and in one source alone.
    tested = len(runs) == 2 and all(run.meta.get("completions_per_prompt", 1) == 1 for run in runs)
    found = differences(pairs, resamples=resamples, seed=seed)
    rows = [
        _row(task, label, part, estimate, tested=tested)
        for (task, label), part, estimate in zip(tasks, pairs, found.tasks, strict=True)
    ]
    everything = Pairs(
        first=np.concatenate([part.first for part in pairs], 1),
        second=np.concatenate([part.second for part in pairs], 1),
    )
    return Comparison(
        first=first,
        second=second,
        tasks=tuple(rows),
        overall=_row(None, "all", everything, found.mean, tested=tested),
        differences=found,
        left_out=len(shared) - len(scored),
    )


def _outcomes(recipe: Recipe, keys: Sequence[Hashable]) -> np.ndarray:
    return np.array([[run.outcomes[key].score for key in keys] for run in recipe.runs], dtype=np.float64)


def _row(task: int | str | None, label: str, pairs: Pairs, difference: Estimate, *, tested: bool) -> Row:
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
        won=won,
        lost=lost,
        difference=difference,
        p=p,
    )


def report(recipes: Sequence[Recipe], comparisons: Sequence[Comparison], notes: Sequence[str]) -> dict[str, Any]:
    """The comparisons for programs. Rates and differences are shares in [0, 1] and [-1, 1]."""
    kind = recipes[0].runs[0].kind
    return {
        "report_version": REPORT_VERSION,
        "kind": kind,
        "method": {
            "interval": "percentile bootstrap, stratified by task",
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "seed": SEED,
            "test": "McNemar, exact, two-sided",
        },
        "recipes": [
            {
                "name": recipe.name,
                "evaluations": [
                    {
                        "path": run.path.as_posix(),
                        "policy_version": run.meta.get("policy_version"),
                        "checkpoint": run.meta.get("checkpoint"),
                    }
                    for run in recipe.runs
                ],
            }
            for recipe in recipes
        ],
        "comparisons": [_comparison(comparison, ASKED[kind]) for comparison in comparisons],
        "notes": list(notes),
    }


def _comparison(comparison: Comparison, asked: str) -> dict[str, Any]:
    found = comparison.differences
    content: dict[str, Any] = {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "overall": _numbers(comparison.overall),
        "per_task": [{"task": row.task, "label": row.label, **_numbers(row)} for row in comparison.tasks],
        f"{asked}_left_out": comparison.left_out,
    }
    if comparison.several_runs:
        first, second = (asdict(side) for side in found.sides)
        content["aggregates"] = {
            "first": first,
            "second": second,
            "change": {"mean": asdict(found.mean), "iqm": asdict(found.iqm)},
        }
    return content


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "pairs": row.pairs,
        "first": row.first,
        "second": row.second,
        "change": asdict(row.difference),
        "won": row.won,
        "lost": row.lost,
        "p": row.p,
    }
