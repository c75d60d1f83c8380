"""Keys that a user sets and the run would not read: better refused than believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS, POLICY_LOSSES, Entry
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
from embodied_rl.tasks.algorithm_rules import OF_REPLAY
from embodied_rl.tasks.rules import AUTO, replaces_env_workers
from embodied_rl.tasks.table import TASKS


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


def _names(schema: type) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]


_READ_BY_ALL: Final = (
    *("learner", "gamma", "group_size", "rollout_epoch", "critic_warmup_steps", "replay", "sac", "sampling_params"),
    *OF_REPLAY,
)
"""Keys of ``algorithm`` that are read whatever becomes of a rollout, or where there is a replay buffer, or that have a
rule of their own there."""

_UNREAD: Final[Sequence[tuple[str, Callable[[Config], bool], str]]] = (
    *(
        (key, _replays, "algorithm.learner trains on a replay buffer")
        for key in (
            *(f"algorithm.{name}" for name in _names(AlgorithmConfig) if name not in _READ_BY_ALL),
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
    (
        "algorithm.critic_warmup_steps",
        lambda c: not (_estimator(c).needs_values or _replays(c)),
        "adv_type needs no value head",
    ),
    ("actor.optim.value_lr", lambda c: not _estimator(c).needs_values, "adv_type needs no value head"),
    ("actor.optim.value_lr", lambda c: c.critic.enable, "values are the critic's; critic.optim.lr is its rate"),
    ("algorithm.value_loss_coef", lambda c: c.critic.enable, "a critic with its own optimiser has that loss alone"),
    *(
        (f"critic.{name}", lambda c: not c.critic.enable, "critic.enable is false")
        for name in _names(CriticConfig)
        if name not in ("enable", "optim")
    ),
    ("critic.optim", lambda c: not (c.critic.enable or _replays(c)), "critic.enable is false"),
    ("critic.optim.value_lr", _replays, "algorithm.sac.temperature_lr is that of the temperature"),
    *(
        (f"model.lora.{name}", lambda c: not c.model.lora.used, "model.lora.rank is 0")
        for name in _names(LoraSettings)
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
        for name in _names(RunnerConfig)
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


def unread_keys(c: Config, overridden: Sequence[str]) -> Iterator[str]:
    """Each key that the user set and the run would not read: why, and what to do."""
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
