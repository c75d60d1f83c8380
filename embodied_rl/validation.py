"""From a plain dict to a checked :class:`Config`: types, unknown keys and rules across fields, all problems at once.

No torch here, and no simulator: a mistake is answered before anything heavy is imported or any worker starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from embodied_rl.algorithms.catalog import ADVANTAGES, POLICY_LOSSES, Entry, lookup
from embodied_rl.algorithms.levels import check_levels
from embodied_rl.envs.registry import adapter_class
from embodied_rl.errors import ConfigError, UserError, suggestion
from embodied_rl.models.registry import MODELS
from embodied_rl.monitoring.metrics import BACKENDS
from embodied_rl.params import describe, parse_params
from embodied_rl.runtime.placement import PlacementError, parse_placement
from embodied_rl.schema import Config

COMPONENTS: Final = ("actor", "rollout", "env")
"""The worker groups of the embodied task."""
SHARING: Final = ("env",)
"""Those whose workers may outnumber the accelerators."""


def build_config(raw: Mapping[str, Any], overridden: Sequence[str] = ()) -> Config:
    """Check ``raw`` and return it as a :class:`Config`.

    Args:
        raw: the resolved configuration as nested dicts and lists.
        overridden: the keys that the user set, dotted; those that the run would not read are refused.

    Raises:
        ConfigError: naming every problem found.
    """
    try:
        config = TypeAdapter(Config).validate_json(json.dumps(raw))
    except ValidationError as error:
        raise ConfigError(describe(error, known_keys())) from None
    problems = [*_rule_problems(config), *_unread_keys(config, overridden)]
    if problems:
        raise ConfigError(problems)
    return config


def known_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for name, kind in _annotations(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from known_keys(kind, f"{prefix}{name}.")


def _annotations(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


# Rules across fields. Each yields what was got, why it cannot be, and what to do.


def _rule_problems(c: Config) -> Iterator[str]:
    yield from _name_problems(c)
    yield from _batch_problems(c)
    yield from _algorithm_problems(c)
    yield from _env_problems(c)


def _name_problems(c: Config) -> Iterator[str]:
    for backend in c.runner.logger.logger_backends:
        if backend not in BACKENDS:
            yield (
                f"runner.logger.logger_backends: got {backend!r}, expected some of {', '.join(BACKENDS)}."
                f"{suggestion(backend, BACKENDS)}"
            )
    if c.model.model_type not in MODELS and ":" not in c.model.model_type:  # the module itself may import torch
        yield (
            f"model.model_type: got {c.model.model_type!r}, expected one of {', '.join(MODELS)}, or module:Class."
            f"{suggestion(c.model.model_type, MODELS)}"
        )
    try:
        adapter = adapter_class(c.env.env_type)
    except UserError as error:
        yield str(error)
    else:
        try:
            parse_params(adapter.Params, c.env.init_params, "env.init_params")
        except ConfigError as error:
            yield from error.problems
    if missing := set(COMPONENTS) - set(c.cluster.num_threads):
        yield f"cluster.num_threads: no entry for {', '.join(sorted(missing))}; add cluster.num_threads.<component>=1"
    for name in set(c.cluster.num_threads) - set(COMPONENTS):
        yield f"cluster.num_threads.{name}: no such component.{suggestion(name, COMPONENTS)}"


def _batch_problems(c: Config) -> Iterator[str]:
    try:
        placement = parse_placement(c.cluster.component_placement, COMPONENTS, sharing=SHARING)
    except PlacementError as error:
        yield f"cluster.component_placement: {error}"
        return
    env_workers, stages = placement.world_size("env"), c.rollout.pipeline_stage_num
    lanes = env_workers * stages
    where = f"{env_workers} env workers x {stages} pipeline stages"
    for name, total in (("train", c.env.train.total_num_envs), ("eval", c.env.eval.total_num_envs)):
        if total % lanes:
            yield (
                f"env.{name}.total_num_envs: got {total}, which does not divide evenly over {where}; "
                f"use a multiple of {lanes}"
            )
    per_lane, group = c.env.train.total_num_envs // lanes, c.algorithm.group_size
    if c.env.train.total_num_envs % lanes == 0 and per_lane % group:
        yield (
            f"algorithm.group_size: got {group}, but each of {where} has {per_lane} envs, and a group is never split; "
            f"use a divisor of {per_lane}, or env.train.total_num_envs={lanes * group}"
        )
    groups = c.env.train.total_num_envs // group * c.algorithm.rollout_epoch
    if placement.world_size("actor") > groups:
        yield (
            f"cluster.component_placement: got {placement.world_size('actor')} actor ranks for {groups} groups of envs "
            "a step; a group is never split, so use fewer ranks, more envs or more algorithm.rollout_epoch"
        )
    if placement.world_size("rollout") > env_workers:
        yield (
            f"cluster.component_placement: got {placement.world_size('rollout')} rollout workers for {env_workers} env "
            "workers; each rollout worker needs an env worker of its own to serve"
        )
    if c.cluster.backend == "serial" and placement.world_size("actor") > 1:
        yield (
            f"cluster.backend=serial: got {placement.world_size('actor')} actor ranks, but one process is one rank; "
            "use cluster=process, or cluster.component_placement.actor=0"
        )


def _algorithm_problems(c: Config) -> Iterator[str]:
    a = c.algorithm
    for key, table in (("adv_type", ADVANTAGES), ("loss_type", POLICY_LOSSES)):
        try:
            lookup(table, key, getattr(a, key))
        except ValueError as error:
            yield str(error)
    estimator = ADVANTAGES.get(a.adv_type)
    try:
        check_levels(a.reward_type, a.logprob_type)
    except ValueError as error:
        yield str(error)
    if (a.n_minibatches is None) == (c.actor.global_batch_size is None):
        yield (
            f"algorithm.n_minibatches={a.n_minibatches} and actor.global_batch_size={c.actor.global_batch_size}: set "
            "exactly one of them, the other to null"
        )
    if estimator and estimator.needs_groups and a.group_size < 2:
        yield (
            f"algorithm.group_size: got {a.group_size}; adv_type={a.adv_type} compares the members of a group, use 2 "
            "or more"
        )
    if estimator and estimator.scores_episodes and c.env.train.auto_reset:
        yield (
            f"env.train.auto_reset: adv_type={a.adv_type} scores one whole episode per env, and auto_reset would "
            "mix several into a score; set env.train.auto_reset=false, or use algorithm=ppo"
        )
    if a.rewards_lower_bound > a.rewards_upper_bound:
        yield (
            f"algorithm.rewards_lower_bound={a.rewards_lower_bound} is above "
            f"rewards_upper_bound={a.rewards_upper_bound}: every group would be masked"
        )


def _env_problems(c: Config) -> Iterator[str]:
    train = c.env.train
    steps = train.max_steps_per_rollout_epoch
    if steps is not None and steps > train.max_episode_steps and not train.auto_reset:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, more than max_episode_steps="
            f"{train.max_episode_steps}, but nothing starts a second episode; set env.train.auto_reset=true"
        )
    if steps is not None and steps < train.max_episode_steps and not train.auto_reset:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, less than max_episode_steps="
            f"{train.max_episode_steps}: episodes would be dropped unfinished; set it to null, or "
            "env.train.auto_reset=true"
        )
    if steps is not None and steps % c.model.num_action_chunks:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, which is not a multiple of "
            f"model.num_action_chunks={c.model.num_action_chunks}"
        )


def _estimator(c: Config) -> Entry:
    return ADVANTAGES[c.algorithm.adv_type]


_UNREAD: Final[Sequence[tuple[str, Callable[[Config], bool], str]]] = (
    ("algorithm.normalize_advantages", lambda c: not _estimator(c).batch_normalized, "adv_type normalises by itself"),
    ("algorithm.value_loss_coef", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.value_clip", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.huber_delta", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("actor.optim.value_lr", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.rewards_lower_bound", lambda c: not c.algorithm.filter_rewards, "algorithm.filter_rewards is false"),
    ("algorithm.rewards_upper_bound", lambda c: not c.algorithm.filter_rewards, "algorithm.filter_rewards is false"),
    ("algorithm.entropy_type", lambda c: c.algorithm.entropy_bonus == 0, "algorithm.entropy_bonus is 0"),
    ("cluster.stall_timeout", lambda c: c.cluster.backend == "serial", "the serial backend detects a stall at once"),
    ("runner.max_keep", lambda c: c.runner.save_interval == -1, "runner.save_interval=-1 saves nothing"),
    ("runner.logger.wandb", lambda c: "wandb" not in c.runner.logger.logger_backends, "no backend here is wandb"),
)
"""Key (or section) -> when the run would not read it -> why. Checked for keys the user set, not for defaults.

Not here: what ``runner.only_eval`` leaves unread. One evaluates with the command that one trained with.
"""


def _unread_keys(c: Config, overridden: Sequence[str]) -> Iterator[str]:
    if c.algorithm.adv_type not in ADVANTAGES or c.algorithm.loss_type not in POLICY_LOSSES:
        return  # said already, and nothing is known of what they read
    for key in dict.fromkeys(overridden):
        for pattern, unread, why in _UNREAD:
            if (key == pattern or key.startswith(pattern + ".")) and unread(c):
                yield f"{key}: this run would not read it, since {why}; leave it out"
                break
        for name, table in (("adv_type", ADVANTAGES), ("loss_type", POLICY_LOSSES)):
            option, choice = key.removeprefix("algorithm."), getattr(c.algorithm, name)
            readers = [entry for entry, its in table.items() if option in its.options]
            if readers and choice not in readers:
                yield (
                    f"{key}: this run would not read it, since {name}={choice} does not use it "
                    f"({', '.join(readers)} does); leave it out"
                )
