"""What reinforcement learning can do from here: findings from a few rollouts and an evaluation of one policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final, Literal

from embodied_rl.errors import UserError
from embodied_rl.evaluation.success import task_name, wilson_interval
from embodied_rl.evaluation.views import differing
from embodied_rl.params import at
from embodied_rl.report.data import STEP_S, Run, TaskRate

GROUP_SIZES: Final = (4, 8, 16, 32)
RARE: Final = 0.05
"""Share of groups with a signal below which most of a step is played for nothing; also the rest below 1 that a
success rate leaves to learn."""
ALIKE: Final = 0.5
"""A share of groups with a signal below so much of what independent members would give: they are alike."""
UNLIKE: Final = 0.1
"""A success rate below which pictures that differ from those learned from are its likely reason."""
_TASK: Final = "env_task/"

Case = Literal["unlike", "never", "dense", "always", "alike", "rare", "sometimes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Successes among episodes, or solved among completions."""

    successes: int
    count: int

    @property
    def rate(self) -> float:
        return self.successes / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, Wilson's."""
        return wilson_interval(self.successes, self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """Numbers of a probe. Shares are in [0, 1]."""

    sampled: Rate
    """Of what training plays: actions, or tokens, are drawn."""
    greedy: Rate
    """Of the evaluation: the most likely ones, unless it was told to draw, too."""
    sampled_tasks: Mapping[str, float]
    """Task, as metrics name it -> success in the steps that played it."""
    greedy_tasks: Mapping[str, float]
    """The same of the evaluation; of completions their sources."""
    group_size: int
    groups: float
    """Of a step."""
    informative: float | None
    """Share of groups whose members score differently; None: groups of one."""
    expected: float | None
    """The same if members were independent, each with its task's success rate. Where initial states differ in
    difficulty it is an upper bound."""
    spread: float
    """Standard deviation of episodes' returns, or completions' scores; 0 where none is better than another."""
    entropy: float | None
    """Nats a unit; None: no group had a signal, so there was no update."""
    length: float
    """Env steps of an episode, or tokens of a completion."""
    samples: float
    """Of a step, at most."""
    step_s: float
    case: Case
    advice: Sequence[str]
    elsewhere: str | None = None
    """Why drawn and likeliest actions are of episodes of two kinds; None: they are of one."""

    def as_json(self) -> dict[str, Any]:
        """For ``probe.json``."""
        return asdict(self) | {
            "sampled_rate": self.sampled.rate,
            "greedy_rate": self.greedy.rate,
            "informative_by_group_size": self.by_group_size(),
            "informative_samples_per_step": self.informative_samples,
            "informative_samples_per_hour": self.informative_samples * 3600 / self.step_s,
        }

    @property
    def informative_samples(self) -> float:
        """Of a step."""
        return self.samples * (1.0 if self.informative is None else self.informative)

    def by_group_size(self) -> dict[int, float]:
        """Expected share of informative groups, at most, by size."""
        rates = list(self.sampled_tasks.values()) or [self.sampled.rate]
        return {size: fmean(mixed(rate, size) for rate in rates) for size in GROUP_SIZES}


def mixed(rate: float, size: int) -> float:
    """Probability that among ``size`` independent members some succeed and some fail: 1 - p^n - (1-p)^n."""
    return 1 - rate**size - (1 - rate) ** size


def prospects_of(run: Run) -> Prospects:
    """From a run that was evaluated first and then played training steps with weights that stood still, and from what
    it found its cameras to show.

    Raises:
        UserError: it has neither.
    """
    evaluation = run.first
    rows = [row for row in run.rows if STEP_S in row]
    if evaluation is None or evaluation.rate is None or not rows:
        raise UserError(f"{run.path}: expected an evaluation and training steps")

    def found(*names: str) -> list[float]:
        """The metric of the first of these names that the run has, in the steps that have it; not finite values count
        as 0."""
        values = ([row[name] or 0.0 for row in rows if name in row] for name in names)
        return next(filter(None, values), [])

    def mean(*names: str) -> float:
        return fmean(found(*names) or [0.0])

    size = int(at(run.config, "algorithm.group_size"))
    played = mean("env/episodes", "rollout/completions") * len(rows)
    rate = mean("env/success_once", "rollout/accuracy")
    metrics = sorted({name for row in rows for name in row if name.startswith(_TASK)})
    tasks = {name.removeprefix(_TASK).removesuffix("/success"): mean(name) for name in metrics}
    entropy = found("actor/entropy")
    prospects = Prospects(
        sampled=Rate(successes=round(rate * played), count=round(played)),
        greedy=Rate(successes=round(evaluation.rate * evaluation.count), count=evaluation.count),
        sampled_tasks=tasks,
        greedy_tasks=_named(evaluation.tasks, () if at(run.config, "eval_env") else tasks),
        group_size=size,
        groups=mean("actor/groups"),
        informative=1 - mean("actor/groups_equal") if size > 1 else None,
        expected=fmean(mixed(one, size) for one in tasks.values() or [rate]) if size > 1 else None,
        spread=mean("env/return_std", "rollout/score_std"),
        entropy=fmean(entropy) if entropy else None,
        length=mean("env/episode_len", "rollout/length"),
        samples=mean("actor/samples"),
        step_s=mean(STEP_S),
        case="sometimes",
        advice=(),
        elsewhere=_elsewhere(run),
    )
    unlike = [one.describe(camera) for camera, one in differing(run.path).items()]
    case = _case(prospects, bool(unlike))
    return replace(prospects, case=case, advice=(*unlike, *_advice(case, prospects, language=run.task == "math")))


def _elsewhere(run: Run) -> str | None:
    if at(run.config, "eval_env"):
        return "the likeliest actions were played in eval_env"
    drawn, likeliest = (at(run.config, f"env.{part}.max_episode_steps") for part in ("train", "eval"))
    if drawn == likeliest:
        return None
    return (
        f"drawn actions were played for {drawn} steps (env.train.max_episode_steps), the likeliest for {likeliest} "
        "(env.eval.max_episode_steps)"
    )


def _named(tasks: Iterable[TaskRate], played: Iterable[str]) -> dict[str, float]:
    """Success by task, named as training's metrics name it: a wording of the task that its evaluation may not have."""
    names = {name.partition("_")[0]: name for name in played}
    return {
        task.task if isinstance(task.task, str) else names.get(f"{task.task:02d}", task_name(task.task, task.label)): (
            task.rate
        )
        for task in tasks
    }


def _case(found: Prospects, unlike: bool) -> Case:
    rate = found.sampled.rate
    if unlike and max(rate, found.greedy.rate) < UNLIKE:
        return "unlike"
    if found.sampled.successes == found.greedy.successes == 0:
        differ = found.spread > 0 if found.informative is None else found.informative >= RARE
        return "dense" if differ else "never"
    if rate >= 1 - RARE:
        return "always"
    if found.informative is not None and found.expected is not None:
        if found.informative < ALIKE * found.expected and found.expected > RARE and found.informative < 1 / 3:
            return "alike"
        if found.informative < RARE:
            return "rare"
    return "sometimes"


def _advice(case: Case, found: Prospects, *, language: bool) -> Iterator[str]:
    """What to change, the most useful first."""
    warmer = "raise algorithm.sampling_params.temperature"
    if case in ("never", "dense"):
        upper = max(found.sampled.interval[1], found.greedy.interval[1])
        if case == "dense":
            yield f"returns differ (by {found.spread:.3g}): a dense reward can lead to the first success"
        yield f"nothing succeeds yet (at most {upper:.1%} would, by the interval). Sooner than from there: " + (
            "a better model (model.path; task=sft on worked answers), or easier prompts"
            if language
            else "a better policy (runner.init_from; task=sft on demonstrations), easier tasks, longer episodes"
        )
    elif case == "always":
        yield f"there is little left to learn: use harder {'prompts' if language else 'tasks'}, or end here"
    elif case == "alike":
        yield (
            f"members of a group do the same: {found.informative:.0%} of the groups have a signal, independent members "
            f"would give up to {found.expected:.0%}: {warmer}; if initial states alone decide, use more groups"
        )
    elif case == "rare":
        yield (
            f"few groups have a signal: use a larger algorithm.group_size, algorithm.filter_rewards with "
            f"max_resample_rounds, or a better start; or {warmer}"
        )
    low, high = found.sampled.interval
    if found.elsewhere is not None:
        if found.greedy.interval[0] > high or found.greedy.interval[1] < low:
            yield f"{found.elsewhere}, so their rates say nothing of each other"
    elif found.greedy.interval[0] > high:
        yield (
            f"drawn actions succeed less often than the likeliest ones ({found.sampled.rate:.1%} against "
            f"{found.greedy.rate:.1%}): lower algorithm.sampling_params.temperature"
        )
    elif found.greedy.interval[1] < low:
        yield "drawn actions succeed more often than the likeliest ones: evaluate with temperature_eval above 0, too"
    between = [name.partition("_")[0] for name, rate in found.sampled_tasks.items() if 0 < rate < 1]
    if not language and case in ("sometimes", "rare") and 0 < len(between) < len(found.sampled_tasks):
        yield (
            f"{len(found.sampled_tasks) - len(between)} of {len(found.sampled_tasks)} tasks always ended alike: spend "
            f"the step on the others, env.task_ids=[{','.join(str(int(one)) for one in between)}]"
        )
