"""From a plain dict to a checked :class:`Config`: types, unknown keys and rules across fields, all problems at once.

No torch here, and no simulator: a mistake is answered before anything heavy is imported or any worker starts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import ValidationError

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS, POLICY_LOSSES, Entry
from embodied_rl.errors import ConfigError, suggestion
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS
from embodied_rl.monitoring.metrics import backend_problems
from embodied_rl.params import at, describe, flat, validator
from embodied_rl.runtime.placement import PlacementError, later_lines_win
from embodied_rl.schema import (
    AlgorithmConfig,
    CollectConfig,
    Config,
    CriticConfig,
    DaggerConfig,
    EmbodiedSftConfig,
    LoraSettings,
    MathConfig,
    PlaySection,
    RunnerConfig,
)
from embodied_rl.tasks.planning import placement_of
from embodied_rl.tasks.rules import (
    AUTO,
    OF_REPLAY,
    acting_problems,
    actor_problems,
    algorithm_problems,
    attention_problems,
    critic_problems,
    precision_problems,
    process_problems,
    reference_problems,
    replaces_env_workers,
    runner_problems,
    staleness_problems,
    trainable_problems,
    weight_sync_problems,
)
from embodied_rl.tasks.secrets import secret_problems
from embodied_rl.tasks.table import TASKS
from embodied_rl.tasks.task import Task

NO_EVAL_ENV: Final = "eval_env: its keys need an env to belong to; choose one, as eval_env=<a choice of env>"

_LONGEST_NAME: Final = 200
"""File systems take 255 bytes; the rest is for what is appended."""
_PATHS: Final = (
    "path",
    "bc_path",
    "demonstrations",
    "teacher",
    "resume_dir",
    "init_from",
    "output_dir",
    "video_base_dir",
    "experiment_name",
)
"""Last parts of keys whose values are paths."""


def build_config(raw: Mapping[str, Any], overridden: Sequence[str] = ()) -> Config:
    """Check ``raw`` and return it as a :class:`Config`.

    Args:
        raw: the resolved configuration as nested dicts and lists.
        overridden: the keys that the user set, dotted; those that the run would not read are refused.

    Raises:
        ConfigError: naming every problem found.
    """
    name = _task_name(raw)
    task = TASKS[name]
    foreign = set[str]().union(*map(_sections, TASKS)) - _sections(name)
    problems = [foreign_section(section, name) for section in raw if section in foreign and raw[section] is not None]
    if misfit := _model_misfit(raw, task):  # its section differs, and so would every further finding
        raise ConfigError([*problems, misfit])
    if isinstance(raw.get("eval_env"), Mapping) and "env_type" not in raw["eval_env"] and "eval_env" not in foreign:
        raise ConfigError([*problems, NO_EVAL_ENV])
    own = {section: content for section, content in raw.items() if section not in foreign}
    if isinstance(own.get("eval_env"), Mapping):
        own["eval_env"] = _with_shared_options(own["eval_env"], own["env"])
    lines = at(own, "cluster.component_placement")
    if isinstance(lines, Mapping):  # what is none stays for pydantic
        chosen = [key.removeprefix("cluster.component_placement.") for key in overridden]
        own["cluster"] = {**own["cluster"], "component_placement": later_lines_win(lines, chosen)}
    if lines == AUTO and at(own, "rollout.pipeline_stage_num"):  # the least, which what is chosen may exceed
        own["rollout"] = {**own["rollout"], "pipeline_stage_num": 1}
    try:
        config = validator(task.config).validate_json(json.dumps(own))
    except ValidationError as error:
        raise ConfigError([*problems, *describe(error, known_keys(task.config), own)]) from None
    problems += [*_path_problems(config), *secret_problems(config)]
    if problems:  # what follows looks into folders
        raise ConfigError(problems)
    problems += [*_rule_problems(config), *_unread_keys(config, overridden)]
    if problems:
        raise ConfigError(problems)
    return config


def _with_shared_options(eval_env: Mapping[str, Any], env: Any) -> Mapping[str, Any]:
    """The section ``eval_env``. Options of ``env`` that it does not set hold for it too where both have the same
    simulator: a recipe asks for the pictures that its policy learned from."""
    if not isinstance(env, Mapping) or env.get("env_type") != eval_env["env_type"]:
        return eval_env
    return {**eval_env, "init_params": {**env["init_params"], **eval_env["init_params"]}}


def _task_name(raw: Mapping[str, Any]) -> str:
    """The run's task.

    Raises:
        ConfigError: there is no such task.
    """
    name = at(raw, "runner.task_type")
    if not isinstance(name, str) or name not in TASKS:
        near = suggestion(str(name), TASKS)
        raise ConfigError([f"runner.task_type: got {name!r}, expected one of {', '.join(TASKS)}.{near}"])
    return str(name)


def _model_misfit(raw: Mapping[str, Any], task: Task) -> str:
    """The message for a model of another task."""
    name = at(raw, "model.model_type")
    if not isinstance(name, str) or name not in MODELS or (name in LANGUAGE_MODELS) == task.language:
        return ""
    if task.language:
        return f"model.model_type: got {name!r}, which acts in an env; use a language model, such as model=tiny_lm"
    return f"model.model_type: got {name!r}, a language model, which does not act in an env; use another, or task=math"


def _sections(task: str) -> set[str]:
    """The top-level sections of a task."""
    return {field.name for field in dataclasses.fields(TASKS[task].config)}


def foreign_section(key: str, task: str) -> str:
    """The message for a key or group of another task than ``task``; empty where it is of no other task."""
    section = key.split(".")[0]
    others = [name for name in TASKS if section in _sections(name) and name != task]
    if section in _sections(task) or not others:
        return ""
    tasks = " or ".join(f"task={name}" for name in others)
    return f"{key}: task={task} has no {section} and would not read it; leave it out, or use {tasks}"


def known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for name, kind in _annotations(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from known_keys(kind, f"{prefix}{name}.")


@functools.cache
def _annotations(schema: type) -> Mapping[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


# Rules across fields. Each yields what was got, why it cannot be, and what to do.


def _rule_problems(c: Config) -> Iterator[str]:
    yield from _name_problems(c)
    task, placement = TASKS[c.runner.task_type], None
    try:
        placement = placement_of(c)
    except PlacementError as error:
        yield f"cluster.component_placement: {error}"
    yield from process_problems(c, placement)
    if task.arithmetic is not None:
        if placement and c.cluster.backend == "serial" and placement.world_size("actor") > 1:
            yield (
                f"cluster.backend=serial: got {placement.world_size('actor')} actor ranks, but one process is one "
                "rank; use cluster=process, or cluster.component_placement.actor=0"
            )
        yield from actor_problems(c, placement)
        yield from runner_problems(c)
        yield from staleness_problems(c)
        yield from precision_problems(c)
        yield from reference_problems(c)
        yield from weight_sync_problems(c, placement)
        yield from algorithm_problems(c)
        yield from critic_problems(c)
    yield from attention_problems(c, placement)
    yield from trainable_problems(c)
    yield from acting_problems(c)
    yield from task.rules(c, placement)


def _path_problems(c: Config) -> Iterator[str]:
    """Problems of paths that no file system has."""
    for key, value in flat(dataclasses.asdict(c)):
        if key.rpartition(".")[2] not in _PATHS or not isinstance(value, str):
            continue
        if not value.isprintable() or any(len(part.encode()) > _LONGEST_NAME for part in value.split("/")):
            yield (
                f"{key}: got {value!r:.80}, expected a path of printable characters with names of at most "
                f"{_LONGEST_NAME} bytes"
            )


def _folder_problems(c: Config) -> Iterator[str]:
    """Problems of where the run would write."""
    name, folder = c.runner.experiment_name, Path(c.runner.output_dir)
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        yield (
            f"runner.experiment_name: got {name!r}, expected a name, or a/b: a folder below runner.output_dir; set "
            "runner.output_dir to write elsewhere"
        )
    if not c.runner.output_dir:
        yield "runner.output_dir: got '', expected a folder; . is the present one"
    there = next(path for path in (folder, *folder.parents, Path()) if path.exists())
    if not there.is_dir():
        yield f"runner.output_dir: got {folder}, but {there} is no folder; choose another"


def _name_problems(c: Config) -> Iterator[str]:
    yield from _folder_problems(c)
    yield from backend_problems(c.runner.logger.logger_backends, c.runner.logger.params)
    if problem := MODELS.problem(c.model.model_type):  # no more than that: the module itself may import torch
        yield problem
    adapters = c.model.lora.path
    if adapters is not None and not (Path(adapters) / "adapter_config.json").is_file():
        yield (
            f"model.lora.path: got {adapters}, which has no adapter_config.json; expected a folder of adapters in "
            "peft's format"
        )
    components = TASKS[c.runner.task_type].components
    if missing := set(components) - set(c.cluster.num_threads):
        yield f"cluster.num_threads: no entry for {', '.join(sorted(missing))}; add cluster.num_threads.<component>=1"
    for key in ("num_threads", "cpu_affinity", "env_vars"):
        for name in set(getattr(c.cluster, key)) - set(components):
            yield (
                f"cluster.{key}.{name}: no such component, expected one of {', '.join(components)}."
                f"{suggestion(name, components)}"
            )


def _estimator(c: Config) -> Entry:
    return ADVANTAGES[c.algorithm.adv_type]


def _replays(c: Config) -> bool:
    return LEARNERS[c.algorithm.learner].replays


def _imitates(c: Config) -> bool:
    return TASKS[c.runner.task_type].imitates


def _strategy(c: Config) -> str:
    return c.actor.fsdp_config.sharding_strategy


def _collects(c: Config) -> bool:
    return isinstance(c, CollectConfig)


def _play(c: Config) -> PlaySection | None:
    """How demonstrations are played, where they are."""
    if isinstance(c, CollectConfig):
        return c.collect
    return c.dagger if isinstance(c, DaggerConfig) else None


def _scripted(c: Config) -> bool:
    played = _play(c)
    return played is not None and played.scripted


def _learner_plays(c: Config) -> bool:
    played = _play(c)
    return played is not None and played.learner_plays


def _noise(c: Config) -> float:
    played = _play(c)
    return played.noise if played is not None else 0.0


def _in_bursts(c: Config) -> bool:
    played = _play(c)
    return played is not None and played.noise_bursts is not None


_READ_BY_ALL: Final = (
    *("learner", "gamma", "group_size", "rollout_epoch", "replay", "sac", "sampling_params"),
    *OF_REPLAY,
)
"""Keys of ``algorithm`` that are read whatever becomes of a rollout, or where there is a replay buffer, or that have a
rule of their own there."""

_UNREAD: Final[Sequence[tuple[str, Callable[[Config], bool], str]]] = (
    *(
        (key, _replays, "algorithm.learner trains on a replay buffer")
        for key in (
            *(f"algorithm.{name}" for name in _annotations(AlgorithmConfig) if name not in _READ_BY_ALL),
            "actor.micro_batch_size",
            "actor.max_tokens_per_micro_batch",
            "actor.global_batch_size",
            "actor.skip_zero_advantages",
            "actor.encode_once",
            "actor.recompute_logprobs",
            "actor.logprob_micro_batch_size",
            "actor.logprob_gap_warning",
        )
    ),
    *(
        (f"algorithm.{name}", lambda c: not _replays(c), "algorithm.learner is on_policy; algorithm=sac has a buffer")
        for name in ("replay", "sac")
    ),
    (
        "algorithm.replay.demonstration_share",
        lambda c: c.algorithm.replay.demonstrations is None,
        "algorithm.replay.demonstrations is null",
    ),
    (
        "algorithm.sac.target_entropy",
        lambda c: c.algorithm.sac.temperature_lr is None,
        "algorithm.sac.temperature_lr is null, so the temperature stays as it is",
    ),
    ("algorithm.normalize_advantages", lambda c: not _estimator(c).batch_normalized, "adv_type normalises by itself"),
    ("algorithm.value_loss_coef", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.value_clip", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.huber_delta", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.critic_warmup_steps", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("actor.optim.value_lr", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("actor.optim.value_lr", lambda c: c.critic.enable, "values are the critic's; critic.optim.lr is its rate"),
    ("algorithm.value_loss_coef", lambda c: c.critic.enable, "a critic with its own optimiser has that loss alone"),
    *(
        (f"critic.{name}", lambda c: not c.critic.enable, "critic.enable is false")
        for name in _annotations(CriticConfig)
        if name not in ("enable", "optim")
    ),
    ("critic.optim", lambda c: not (c.critic.enable or _replays(c)), "critic.enable is false"),
    ("critic.optim.value_lr", _replays, "algorithm.sac.temperature_lr is that of the temperature"),
    *(
        (f"model.lora.{name}", lambda c: not c.model.lora.used, "model.lora.rank is 0")
        for name in _annotations(LoraSettings)
        if name not in ("rank", "path")
    ),
    *(
        (f"model.lora.{name}", lambda c: c.model.lora.path is not None, "the folder in model.lora.path says it")
        for name in ("rank", "alpha", "target_modules", "use_rslora", "init_lora_weights")
    ),
    ("algorithm.normalize_returns", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("algorithm.reward_norm", lambda c: not _estimator(c).reward_normalized, "adv_type takes scores as they are"),
    ("algorithm.adv_norm", lambda c: not _estimator(c).batch_normalized, "adv_type normalises by itself"),
    ("algorithm.adv_norm", lambda c: not c.algorithm.normalize_advantages, "normalize_advantages is false"),
    (
        "algorithm.loss_scale_factor",
        lambda c: not c.algorithm.loss_agg_func.endswith("-norm"),
        "algorithm.loss_agg_func is not seq-mean-token-sum-norm",
    ),
    (
        "algorithm.behav_imp_weight_mode",
        lambda c: c.algorithm.behav_imp_weight_cap is None,
        "algorithm.behav_imp_weight_cap is null",
    ),
    ("algorithm.bc_path", lambda c: c.algorithm.bc_coef == 0, "algorithm.bc_coef is 0"),
    ("algorithm.bc_batch_size", lambda c: c.algorithm.bc_coef == 0, "algorithm.bc_coef is 0"),
    ("algorithm.kl_penalty_type", lambda c: c.algorithm.kl_beta == 0, "algorithm.kl_beta is 0"),
    ("actor.reference_dtype", lambda c: c.algorithm.kl_beta == 0, "algorithm.kl_beta is 0"),
    ("algorithm.kl_in", lambda c: c.algorithm.kl_beta == 0, "algorithm.kl_beta is 0"),
    ("algorithm.kl_ctrl", lambda c: c.algorithm.kl_beta == 0, "algorithm.kl_beta is 0"),
    ("algorithm.kl_ctrl.target_kl", lambda c: c.algorithm.kl_ctrl.type == "fixed", "kl_ctrl.type is fixed"),
    ("algorithm.kl_ctrl.horizon", lambda c: c.algorithm.kl_ctrl.type == "fixed", "kl_ctrl.type is fixed"),
    ("algorithm.rewards_lower_bound", lambda c: not c.algorithm.filter_rewards, "algorithm.filter_rewards is false"),
    ("algorithm.rewards_upper_bound", lambda c: not c.algorithm.filter_rewards, "algorithm.filter_rewards is false"),
    ("algorithm.entropy_type", lambda c: c.algorithm.entropy_bonus == 0, "algorithm.entropy_bonus is 0"),
    (
        "actor.lr_sched.lr_warmup_iters",
        lambda c: c.actor.lr_sched.lr_warmup_fraction is not None,
        "actor.lr_sched.lr_warmup_fraction says how long the rate rises; null turns that off",
    ),
    ("actor.lr_sched.lr_decay_iters", lambda c: c.actor.lr_sched.lr_decay_style == "constant", "nothing decays"),
    ("actor.lr_sched.min_lr_ratio", lambda c: c.actor.lr_sched.lr_decay_style == "constant", "nothing decays"),
    ("actor.lr_sched.wsd_decay_fraction", lambda c: c.actor.lr_sched.lr_decay_style != "wsd", "the style is not wsd"),
    ("actor.offload", lambda c: not c.actor.enable_offload, "actor.enable_offload is false"),
    ("critic.offload", lambda c: not c.critic.enable_offload, "critic.enable_offload is false"),
    ("actor.logprob_gap_warning", lambda c: not c.actor.recompute_logprobs, "actor.recompute_logprobs is false"),
    ("actor.encode_once", lambda c: c.algorithm.update_epoch == 1, "algorithm.update_epoch is 1"),
    ("actor.fsdp_config.fsdp_size", lambda c: _strategy(c) != "hybrid_shard", "sharding_strategy is not hybrid_shard"),
    ("actor.fsdp_config.reshard_after_forward", lambda c: _strategy(c) == "no_shard", "no_shard gathers nothing"),
    ("cluster.stall_timeout", lambda c: c.cluster.backend == "serial", "the serial backend detects a stall at once"),
    ("cluster.memory_limit", lambda c: c.cluster.backend == "serial", "the serial backend has one process"),
    ("cluster.memory_limit", lambda c: c.cluster.backend == "ray", "the limit is one machine's"),
    ("cluster.address", lambda c: c.cluster.backend != "ray", "cluster.backend is not ray"),
    ("cluster.wait_for_nodes", lambda c: c.cluster.backend != "ray", "cluster.backend is not ray"),
    ("cluster.node_groups", lambda c: c.cluster.backend != "ray", "cluster.backend is not ray"),
    *(
        (key, lambda c: c.cluster.component_placement == AUTO, "cluster.component_placement=auto chooses it")
        for key in ("cluster.num_threads.actor", "rollout.pipeline_stage_num")
    ),
    (
        "actor.skip_zero_advantages",
        lambda c: c.algorithm.early_stop_imp_ratio is not None,
        "algorithm.early_stop_imp_ratio asks for the ratio of all samples",
    ),
    ("runner.trace_steps", lambda c: c.runner.task_type == "collect", "it trains nothing"),
    ("runner.recover", lambda c: c.cluster.backend == "serial", "the serial backend hands a failure to the debugger"),
    ("runner.max_recoveries", lambda c: c.runner.recover == "never", "runner.recover is never"),
    ("runner.max_keep", lambda c: not c.runner.saves, "it saves nothing"),
    ("runner.save_async", lambda c: not c.runner.saves, "it saves nothing"),
    ("runner.save_contents", lambda c: not c.runner.saves, "it saves nothing"),
    *(
        (key, lambda c: _imitates(c), "demonstrations are made by no policy")
        for key in (
            *("runner.weight_sync_interval", "rollout.max_staleness"),
            *("rollout.interruptible", "rollout.chunks_ahead"),
            *("rollout.top_p", "rollout.top_k", "rollout.repetition_penalty"),
            *("reward.mask_truncated", "reward.overlong_buffer_length", "reward.overlong_penalty_factor"),
        )
    ),
    (
        "reward.overlong_penalty_factor",
        lambda c: isinstance(c, MathConfig) and c.reward.overlong_buffer_length == 0,
        "reward.overlong_buffer_length is 0",
    ),
    ("env.eval", lambda c: getattr(c, "eval_env", None) is not None, "eval_env is evaluated"),
    ("eval_env.train", lambda c: True, "it trains in env"),
    *(
        (
            f"env.{name}",
            lambda c: not replaces_env_workers(c),
            "env workers are replaced in task=embodied, not with cluster=serial, where rollout.max_staleness is 0, and "
            "env.train.auto_reset does not come with algorithm.max_resample_rounds",
        )
        for name in ("max_restarts", "worker_timeout", "max_memory_gb")
    ),
    ("env.max_memory_gb", lambda c: replaces_env_workers(c) and c.env.max_restarts == 0, "env.max_restarts is 0"),  # type: ignore[union-attr]
    ("env.train", lambda c: isinstance(c, EmbodiedSftConfig), "it trains on demonstrations, not in the env"),
    *(
        (section, _collects, "it collects demonstrations and trains nothing")
        for section in (
            "algorithm",
            "actor",
            "critic",
            "env.train",
            "env.eval",
            "env.reward_coef",
        )
    ),
    (
        "env.use_rel_reward",
        lambda c: isinstance(c, CollectConfig) and "success_return" not in c.env.init_params,
        "it collects demonstrations, and no success_return asks what they return",
    ),
    *(
        (f"runner.{name}", _collects, "it collects demonstrations and trains nothing")
        for name in _annotations(RunnerConfig)
        if name.startswith(("max_", "val_", "eval_", "save_", "weight_", "recover"))
    ),
    *(
        (key, lambda c: _collects(c) and not _learner_plays(c), "the expert plays (collect.policy)")
        for key in ("model", "runner.init_from")
    ),
    (
        "collect.temperature",
        lambda c: _scripted(c) and not _learner_plays(c),
        "the expert plays (collect.policy)",
    ),
    *(
        (f"{section}.{key}", lambda c: not _scripted(c), "a model plays, or a teacher (collect.policy)")
        for section in ("collect", "dagger")
        for key in ("expert", "expert_params", "expert_noise")
    ),
    *(
        (f"{name}.{key}", lambda c: _noise(c) == 0, f"{name}.noise is 0")
        for name in ("collect", "dagger")
        for key in ("noise_correlation", "noise_bursts")
    ),
    *(
        (f"{name}.noise_correlation", _in_bursts, f"a burst's noise is the same in all its steps ({name}.noise_bursts)")
        for name in ("collect", "dagger")
    ),
    ("reward.timeout", lambda c: isinstance(c, MathConfig) and c.reward.num_processes == 0, "num_processes is 0"),
    ("runner.logger.wandb", lambda c: "wandb" not in c.runner.logger.logger_backends, "no backend here is wandb"),
)
"""Key (or section) -> when the run would not read it -> why. Checked for keys the user set, not for defaults.

Not here: what ``runner.only_eval`` leaves unread. One evaluates with the command that one trained with.
"""


def _unread_keys(c: Config, overridden: Sequence[str]) -> Iterator[str]:
    chosen = {"adv_type": ADVANTAGES.get(c.algorithm.adv_type), "loss_type": POLICY_LOSSES.get(c.algorithm.loss_type)}
    if None in chosen.values():
        return  # said already, and nothing is known of what they read
    for key in dict.fromkeys(overridden):
        if not _replays(c) and any(
            entry and _reads(entry, key.removeprefix("algorithm.")) for entry in chosen.values()
        ):
            continue
        for pattern, unread, why in _UNREAD:
            if (key == pattern or key.startswith(pattern + ".")) and unread(c):
                yield f"{key}: this run would not read it, since {why}; leave it out"
                break
        if _replays(c):
            continue
        for name, table in (("adv_type", ADVANTAGES), ("loss_type", POLICY_LOSSES)):
            option, choice = key.removeprefix("algorithm."), getattr(c.algorithm, name)
            readers = [other for other, entry in table.items() if _reads(entry, option)]
            if readers:
                yield (
                    f"{key}: this run would not read it, since {name}={choice} does not use it "
                    f"({', '.join(readers)} does); leave it out"
                )


def _reads(entry: Entry, option: str) -> bool:
    return option in (*entry.options, *entry.sections)
