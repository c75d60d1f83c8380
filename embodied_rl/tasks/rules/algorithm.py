"""What cannot be in any task's ``algorithm`` section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES, Entry, check_levels
from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.params import unknown_key
from embodied_rl.schema import AlgorithmConfig, Config, NormConfig
from embodied_rl.tasks.rules.group_filter import filter_problems


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
    if estimator := ADVANTAGES.get(a.adv_type):
        yield from _estimator_problems(a, estimator)
    if loss := POLICY_LOSSES.get(a.loss_type):
        yield from _loss_problems(c, loss)
    yield from filter_problems(c)


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


def _estimator_problems(a: AlgorithmConfig, estimator: Entry) -> Iterator[str]:
    sections = {"reward_norm": estimator.reward_normalized}
    sections["adv_norm"] = estimator.batch_normalized and a.normalize_advantages
    compares = f"adv_type={a.adv_type} compares the members of a group" if estimator.needs_groups else ""
    for section, used in sections.items():
        norm: NormConfig = getattr(a, section)
        if used and "group" in (norm.mean_level, norm.std_level):
            compares = compares or f"algorithm.{section} has the level group"
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
    for key in ("behav_imp_weight_cap", "m2_threshold"):
        if a.prox_logp_method == "loglinear" and getattr(a, key) is not None:
            yield (
                f"algorithm.{key}: chooses units before the update by the proximal log-probabilities, and "
                "prox_logp_method=loglinear has them only during it; set it to null, or use recompute"
            )
