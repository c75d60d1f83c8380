"""Reports that several tasks share: an update's metrics, the problem of a training step, evaluations' folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.schema import Config
from embodied_rl.workers.actor import UpdateReport

C = TypeVar("C", bound=Config)


class Timed(Protocol):
    @property
    def seconds(self) -> dict[str, float]: ...


def longest(reports: Sequence[Timed], phase: str) -> float:
    """The slowest worker's seconds in a phase."""
    return max((report.seconds.get(phase, 0.0) for report in reports), default=0.0)


def actor_metrics(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """The actor's metrics of an update, and the seconds of its phases."""
    phases = sorted({name for report in updates for name in report.seconds})
    return {f"actor/{name}": value for name, value in updates[0].metrics.items()} | {
        f"time/{name}": longest(updates, name) for name in phases
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A task's words on steps that teach nothing."""

    score: str
    """Name of the mean of a group's scores."""
    easier: str
    """The remedy where that is too low."""
    harder: str
    """The remedy where it is too high."""
    equal: str
    """The message where the members of every group score the same."""


def step_problem(metrics: Mapping[str, float], config: Config, advice: Advice) -> str | None:
    """The problem of a training step, above all why it cannot have taught the policy anything, and what to do; None if
    there is none."""
    if text := _nothing_left(metrics, config, advice):
        return text
    if ADVANTAGES[config.algorithm.adv_type].needs_groups and metrics["actor/groups_equal"] == 1:
        return advice.equal
    return _gap_problem(metrics, config)


def _nothing_left(metrics: Mapping[str, float], config: Config, advice: Advice) -> str | None:
    """Why a training step had no sample, and what to do; None if it had some."""
    if metrics["actor/samples"]:
        return None
    a, mean = config.algorithm, metrics["actor/score"]
    if metrics["actor/groups"]:
        return (
            f"no update: algorithm.behav_imp_weight_cap={a.behav_imp_weight_cap} left out every unit: the policy that "
            "acted is too far from the one that is trained; raise it, or lower actor.optim.lr or rollout.max_staleness"
        )
    rounds = int(metrics["rollout/rounds"]) - 1
    also = f", also those of {rounds} further round{'s' if rounds > 1 else ''}" if rounds else ""
    bounds = f"{a.rewards_lower_bound:g} to {a.rewards_upper_bound:g} (rewards_lower_bound, rewards_upper_bound)"
    if mean < a.rewards_lower_bound:
        todo = advice.easier
    elif mean > a.rewards_upper_bound:
        todo = advice.harder
    else:
        todo = "use more groups or larger ones, or widen the bounds"
    return (
        f"no update: algorithm.filter_rewards masked every group{also}: none has a {advice.score} of {bounds}, over "
        f"all groups it is {mean:.3g}; {todo}"
    )


def _gap_problem(metrics: Mapping[str, float], config: Config) -> str | None:
    """A rollout that computes other log-probabilities than the trainer; None if they are near."""
    gap, limit = metrics.get("actor/logprob_gap"), config.actor.logprob_gap_warning
    if gap is None or limit is None or not config.actor.recompute_logprobs or gap <= limit:
        return None
    return (
        f"the rollout's log-probabilities differ from the trainer's by more than actor.logprob_gap_warning={limit:g} "
        "on average: compare the precision of both (actor.fsdp_config.mixed_precision, the model's dtype), or raise "
        "the bound"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter(Generic[C]):
    """Base of what shows an evaluation and writes it to ``<run>/eval_step_<n>/``."""

    config: C
    run_dir: Path
    console: Console
    checkpoint: str | None
    """Origin of the run's first weights, relative to its run's directory; None: they were initialised."""
    first_step: int
    """Training steps behind those; weights of later ones were trained here."""

    def policy_facts(self, step: int) -> dict[str, Any]:
        """The part of an ``eval.json``'s ``meta`` that says which policy was evaluated."""
        return {
            "policy_version": step,
            "checkpoint": self.checkpoint if step == self.first_step else None,
            "model_type": self.config.model.model_type,
        }


def eval_name(step: int) -> str:
    """The folder of an evaluation, in its run's directory and among its videos."""
    return f"eval_step_{step:06d}"
