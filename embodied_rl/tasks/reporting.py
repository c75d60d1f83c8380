"""Reports that several tasks share: a step's metrics and its problem, evaluations' folders, the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Generic, Protocol, TypeVar

from rich.console import Console

from embodied_rl.algorithms.catalog import ADVANTAGES
from embodied_rl.checkpoints.store import complete_checkpoints
from embodied_rl.errors import UserError
from embodied_rl.evaluation.comparison import Recipe, check_comparable, compare
from embodied_rl.evaluation.eval_file import SavedEvaluation, evaluations_of, read_evaluation
from embodied_rl.monitoring.peak_memory import memory_metrics
from embodied_rl.monitoring.work import Flops, Work, perf_metrics
from embodied_rl.params import argument
from embodied_rl.schema import Config, EmbodiedConfig
from embodied_rl.workers.actor import UpdateReport

C = TypeVar("C", bound=Config)


class Timed(Protocol):
    @property
    def seconds(self) -> dict[str, float]: ...


def longest(reports: Sequence[Timed], phase: str) -> float:
    """The slowest worker's seconds in a phase."""
    return max((report.seconds.get(phase, 0.0) for report in reports), default=0.0)


def actor_metrics(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """The actor's metrics of an update, its memory, and the seconds and the work of its phases."""
    phases = sorted({name for report in updates for name in report.seconds})
    metrics = {f"actor/{name}": value for name, value in updates[0].metrics.items()}
    metrics |= {f"time/{name}": longest(updates, name) for name in phases}
    for phase in sorted({name for report in updates for name in report.flops}):
        # A rank without a sample waited for the others.
        work = [Work(flops=report.flops.get(phase, Flops()), peak=report.peak) for report in updates]
        metrics |= perf_metrics(phase, work, longest(updates, phase))
    return metrics | memory_metrics("update", [report.peak_memory for report in updates])


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
    alike = ADVANTAGES[config.algorithm.adv_type].needs_groups and metrics.get("actor/groups_equal") == 1
    if alike and not metrics.get("actor/grad_norm"):  # or something else than advantages taught it
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


def video_folder(config: EmbodiedConfig, run_dir: Path) -> Path:
    """The folder of a run's evaluations' videos."""
    return Path(config.evaluated.eval.video_cfg.video_base_dir) / f"{config.runner.experiment_name}_{run_dir.name}"


def eval_name(step: int) -> str:
    """The folder of an evaluation, in its run's directory and among its videos."""
    return f"eval_step_{step:06d}"


def end_of(run_dir: Path, config: Config, command: Sequence[str] | None) -> Iterator[str]:
    """The last lines of a training run: its last evaluation against its first, checkpoints, and the commands that come
    next.

    Args:
        command: the run's own arguments; None: it was not started by the command line.
    """
    found = _evaluations(run_dir)
    rates = {step: rate for step, evaluation in found.items() if (rate := _rate(evaluation)) is not None}
    if rates:
        yield f"evaluated:  {rates[max(rates)]:.1%} after {max(rates)} steps{_against_first(found, rates)}"
    checkpoints = checkpoints_of(run_dir)
    if not checkpoints:
        return
    last = checkpoints[max(checkpoints)]
    best = best_step(checkpoints, rates)
    yield f"checkpoint: {last}"
    if checkpoints[best] != last and rates[best] > rates.get(max(checkpoints), 0.0):
        yield f"best:       {checkpoints[best]} ({rates[best]:.1%})"
    if isinstance(config, EmbodiedConfig) and (videos := video_folder(config, run_dir)).is_dir():
        yield f"watch:      {videos}"
    python = "python train.py" if Path("train.py").is_file() else "embodied-rl"
    if command is not None:
        own = [text for text in command if not text.startswith(_RESUMING)]
        alone = [text for text in own if not text.startswith("runner.init_from=")]
        evaluated = shlex.join([*alone, argument("runner.resume_dir", str(checkpoints[best])), "runner.only_eval=true"])
        yield f"evaluate:   {python} {evaluated}"
        if "optimizer" in config.runner.save_contents:
            steps = f"runner.max_steps={2 * config.runner.max_steps}"
            same = own if config.algorithm.kl_beta else alone  # of runner.init_from a reference policy is made
            yield f"go on:      {python} {shlex.join([*same, argument('runner.resume_dir', str(run_dir)), steps])}"
    yield f"export:     {python} export {shlex.quote(str(checkpoints[best]))} <folder>"


def best_step(checkpoints: Mapping[int, Path], rates: Mapping[int, float]) -> int:
    """Of a run's checkpoints the one that was evaluated best, the later of equals; the last where none was evaluated.

    Args:
        checkpoints: by training steps; at least one.
        rates: success or accuracy of evaluations, by training steps.
    """
    kept = {step: rate for step, rate in rates.items() if step in checkpoints}
    return max(kept, key=lambda step: (kept[step], step), default=max(checkpoints))


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    """A run's complete checkpoints, by training steps."""
    return {int(path.name.rpartition("_")[2]): path for path in complete_checkpoints(run_dir / "checkpoints")}


_RESUMING: Final = ("runner.resume_dir=", "runner.max_steps=", "runner.only_eval=")


def _evaluations(run_dir: Path) -> dict[int, SavedEvaluation]:
    """By finished training steps; none where a file cannot be read, as of another version before a resume."""
    try:
        return {step: read_evaluation(path) for step, path in evaluations_of(run_dir).items()}
    except UserError:
        return {}


def _rate(evaluation: SavedEvaluation) -> float | None:
    """Success rate or accuracy; None where no completion was verified."""
    scores = [outcome.score for outcome in evaluation.outcomes.values() if outcome.score is not None]
    return fmean(scores) if scores else None


def _against_first(found: Mapping[int, SavedEvaluation], rates: Mapping[int, float]) -> str:
    """The last evaluation against the first, in words; nothing where it is the same or cannot be compared."""
    first, last = min(rates), max(rates)
    if first == last:
        return ""
    try:
        check_comparable([found[first], found[last]])
        overall = compare(Recipe(name="A", runs=(found[first],)), Recipe(name="B", runs=(found[last],))).overall
    except UserError:  # the run was resumed with another evaluation
        return ""
    text = f", {rates[first]:.1%} after {first}: {100 * overall.change.value:+.1f} points"
    if overall.change.interval is not None:
        low, high = (100 * bound for bound in overall.change.interval)
        text += f" (95 % interval {low:.1f} to {high:.1f})"
    return f"{text}, paired over {overall.pairs}"
