"""Rules across fields of an algorithm: each problem says what was got, why it cannot be, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS, POLICY_LOSSES, Entry, check_levels
from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.language.rewards.functions import PASS_OR_FAIL, parts_of, score_range
from embodied_rl.params import unknown_key
from embodied_rl.schema import AlgorithmConfig, Config, EmbodiedConfig, MathConfig, NormConfig


def algorithm_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    a = c.algorithm
    found: list[Entry] = []
    for table, name in ((ADVANTAGES, a.adv_type), (POLICY_LOSSES, a.loss_type)):
        try:
            found.append(table[name])
        except UserError as error:
            yield str(error)
    if len(found) == 2:
        yield from _params_problems(a, found)
    try:
        check_levels(a.reward_type, a.logprob_type)
    except ValueError as error:
        yield str(error)
    if (a.n_minibatches is None) == (c.actor.global_batch_size is None):
        yield (
            f"algorithm.n_minibatches={a.n_minibatches} and actor.global_batch_size={c.actor.global_batch_size}: set "
            "exactly one of them, the other to null"
        )
    if loss := POLICY_LOSSES.get(a.loss_type):
        yield from _loss_problems(c, loss)
    yield from _bc_problems(c)
    if LEARNERS[a.learner].replays:
        yield from _learner_problems(c)
        return
    if estimator := ADVANTAGES.get(a.adv_type):
        yield from _estimator_problems(c, estimator)
    yield from _filter_problems(c)


OF_REPLAY: Final[Mapping[str, Any]] = {
    "adv_type": "raw",
    "filter_rewards": False,
    "max_resample_rounds": 0,
    "kl_beta": 0.0,
    "bc_coef": 0.0,
    "positive_nll_coef": None,
    "entropy_bonus": 0.0,
}
"""Keys of ``algorithm`` that say what becomes of a step's rollouts, or ask for a term of the loss, and what they have
where a buffer takes all."""


def _learner_problems(c: Config) -> Iterator[str]:
    a = c.algorithm
    if type(c) is not EmbodiedConfig:
        yield (
            f"algorithm.learner: got {a.learner}, but task={c.runner.task_type} has no simulator to learn in; use "
            "on_policy, or task=embodied"
        )
        return
    for key, wanted in OF_REPLAY.items() if not c.runner.only_eval else ():
        if (got := getattr(a, key)) != wanted:
            yield (
                f"algorithm.{key}: got {got!r}, but algorithm.learner={a.learner} trains on a replay buffer and would "
                f"not read it; use algorithm=sac, which has {wanted!r}, or set that"
            )


def _bc_problems(c: Config) -> Iterator[str]:
    a = c.algorithm
    if not a.bc_coef:
        return
    if type(c) is not EmbodiedConfig:
        yield (
            f"algorithm.bc_coef: got {a.bc_coef}, but task={c.runner.task_type} has no policy in an env that could be "
            "kept to recorded episodes; use 0"
        )
    elif not a.bc_path:
        yield (
            f"algorithm.bc_coef: got {a.bc_coef}, but there are no demonstrations to keep to; set algorithm.bc_path to "
            "the folder of a LeRobot data set, or bc_coef to 0"
        )


def _params_problems(a: AlgorithmConfig, entries: Sequence[Entry]) -> Iterator[str]:
    keys = [field.name for entry in entries if entry.params for field in dataclasses.fields(entry.params)]
    for name in a.params:
        if not keys:
            own = [f"algorithm.{field.name}" for field in dataclasses.fields(a)]
            yield (
                f"algorithm.params.{name}: adv_type={a.adv_type} and loss_type={a.loss_type} have no hyperparameters "
                f"of their own; those of built-in algorithms are keys of algorithm itself."
                f"{suggestion(f'algorithm.{name}', own, cutoff=0.8)}"
            )
        elif name not in keys:
            yield unknown_key(f"algorithm.params.{name}", [f"algorithm.params.{key}" for key in keys])
    for entry in entries:
        try:
            entry.own_params(a.params)
        except ConfigError as error:
            yield from error.problems


def _estimator_problems(c: Config, estimator: Entry) -> Iterator[str]:
    a = c.algorithm
    sections = {"reward_norm": estimator.reward_normalized}
    sections["adv_norm"] = estimator.batch_normalized and a.normalize_advantages
    compares = f"adv_type={a.adv_type} compares the members of a group" if estimator.needs_groups else ""
    for section, used in sections.items():
        norm: NormConfig = getattr(a, section)
        if used and "group" in (norm.mean_level, norm.std_level):
            compares = compares or f"algorithm.{section} has the level group"
        if used and "task" in (norm.mean_level, norm.std_level) and type(c) is not EmbodiedConfig:
            yield (
                f"algorithm.{section}: got the level task, but task={c.runner.task_type} has no tasks to tell apart; "
                "use group or batch"
            )
        if norm.leave_one_out and norm.mean_level == "none":
            yield f"algorithm.{section}.leave_one_out: there is no mean to leave one out of; set {section}.mean_level"
    if compares and a.group_size < 2:
        yield f"algorithm.group_size: got {a.group_size}; {compares}, use 2 or more"


def _loss_problems(c: Config, loss: Entry) -> Iterator[str]:
    a = c.algorithm
    if "prox_logp_method" not in loss.sections:
        return
    if c.actor.recompute_logprobs:
        yield (
            f"actor.recompute_logprobs: loss_type={a.loss_type} weighs by the rollout's own log-probabilities; set it "
            "to false"
        )
    masking = {"m2_threshold": a.m2_threshold}
    if a.behav_imp_weight_mode == "mask":
        masking["behav_imp_weight_cap"] = a.behav_imp_weight_cap
    for key, value in masking.items():
        if a.prox_logp_method == "loglinear" and value is not None:
            yield (
                f"algorithm.{key}: chooses units before the update by the proximal log-probabilities, and "
                "prox_logp_method=loglinear has them only during it; set it to null, or use recompute"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Range of a group member's scores."""

    name: str
    low: float
    high: float
    pass_or_fail: bool
    """Nothing between ``low`` and ``high``."""


def _filter_problems(c: Config) -> Iterator[str]:
    a = c.algorithm
    if a.max_resample_rounds and not a.filter_rewards:
        yield "algorithm.max_resample_rounds: nothing is filtered, so nothing is missing; set filter_rewards=true"
    lower, upper, size = a.rewards_lower_bound, a.rewards_upper_bound, a.group_size
    if lower > upper:
        yield (
            f"algorithm.rewards_lower_bound={lower} is above rewards_upper_bound={upper}: every group would be masked"
        )
    elif a.filter_rewards and (scores := _scores(c)):
        outside = [
            f"algorithm.{key}: got {bound:g}, but it is compared with a group's mean score, and {scores.name}; use "
            f"{scores.low:g} to {scores.high:g}"
            for key, bound in (("rewards_lower_bound", lower), ("rewards_upper_bound", upper))
            if not scores.low <= bound <= scores.high
        ]
        yield from outside
        first = int(lower * size)
        means = [k / size for k in range(first, first + 3)]  # the lowest within, if there is one, is among these
        if scores.pass_or_fail and not outside and not any(lower <= mean <= upper for mean in means):
            yield (
                f"algorithm.rewards_lower_bound={lower:g}, rewards_upper_bound={upper:g}: no group of "
                f"group_size={size} can pass, since {scores.name}, and so means are multiples of 1/{size}; widen the "
                "bounds, or use larger groups"
            )


def _scores(c: Config) -> _Scores | None:
    """None where nothing is known of them."""
    if isinstance(c, EmbodiedConfig):
        name = "an episode's score is its success, 1 or 0, whatever its rewards (env.reward_coef)"
        return _Scores(name=name, low=0.0, high=1.0, pass_or_fail=True)
    if not isinstance(c, MathConfig):
        return None
    try:
        known = score_range(parts_of(c.reward.function, c.reward.params))
    except ConfigError:  # said where rewards are checked
        return None
    if known is None:
        return None
    low, high = known
    pass_or_fail = c.reward.function in PASS_OR_FAIL
    between = f"{high:g} or {low:g}" if pass_or_fail else f"{low:g} to {high:g}"
    name = f"a completion's score is what reward.function={c.reward.function} gives, {between}, without penalties"
    return _Scores(name=name, low=low, high=high, pass_or_fail=pass_or_fail)
