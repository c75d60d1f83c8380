"""Rules and arithmetic of ``task=embodied``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS
from embodied_rl.envs.base import adapter_class
from embodied_rl.errors import ConfigError, UserError
from embodied_rl.params import parse_params
from embodied_rl.plan import Arithmetic
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import CollectConfig, EmbodiedConfig, EnvConfig
from embodied_rl.tasks.task import Task, trajectory_capacity


def embodied_problems(c: EmbodiedConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    yield from _name_problems(c)
    if c.runner.only_eval:  # sizes of training do not matter then
        yield from lane_problems(c, placement, eval_envs(c)) if placement else ()
        return
    if placement:
        yield from _batch_problems(c, placement)
    yield from _episode_problems(c)


def _name_problems(c: EmbodiedConfig) -> Iterator[str]:
    if c.algorithm.loss_type == "nll":
        yield "algorithm.loss_type: nll imitates demonstrations, and envs have none; use another loss, or task=sft"
    yield from adapter_problems(c)


def adapter_problems(c: EmbodiedConfig | CollectConfig) -> Iterator[str]:
    """Problems of the simulators' names and options."""
    for section in ("env", "eval_env"):
        env: EnvConfig | None = getattr(c, section, None)
        if env is None:
            continue
        try:
            adapter = adapter_class(env.env_type)
            params = parse_params(adapter.Params, env.init_params, f"{section}.init_params")
            getattr(adapter, "check", lambda _: None)(params)
            if not hasattr(adapter, "render"):
                for mode in ("train", "eval"):
                    if getattr(env, mode).video_cfg.save_video:
                        key = f"{section}.{mode}.video_cfg.save_video"
                        yield f"{key}: got true, but {adapter.__name__} has no render(); set it to false"
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield str(error)


def _batch_problems(c: EmbodiedConfig, placement: Placement) -> Iterator[str]:
    env_workers, stages = placement.world_size("env"), c.rollout.pipeline_stage_num
    lanes = env_workers * stages
    where = f"{env_workers} env workers x {stages} pipeline stages"
    yield from lane_problems(c, placement, {"env.train": c.env.train.total_num_envs, **eval_envs(c)})
    per_lane, group = c.env.train.total_num_envs // lanes, c.algorithm.group_size
    if c.env.train.total_num_envs % lanes == 0 and per_lane % group:
        yield (
            f"algorithm.group_size: got {group}, but each of {where} has {per_lane} envs, and a group is never split; "
            f"use a divisor of {per_lane}, or env.train.total_num_envs={lanes * group}"
        )
    yield from _replay_problems(c, placement)
    groups = arithmetic(c, placement).groups
    if c.algorithm.bc_coef and c.algorithm.bc_batch_size % placement.world_size("actor"):
        yield (
            f"algorithm.bc_batch_size: got {c.algorithm.bc_batch_size}, which does not divide evenly over "
            f"{placement.world_size('actor')} actor ranks; use a multiple of {placement.world_size('actor')}"
        )
    if placement.world_size("actor") > groups:
        yield (
            f"cluster.component_placement: got {placement.world_size('actor')} actor ranks for {groups} groups of envs "
            "a step; a group is never split, so use fewer ranks, more envs or more algorithm.rollout_epoch"
        )


def _replay_problems(c: EmbodiedConfig, placement: Placement) -> Iterator[str]:
    algorithm, replay, sac = c.algorithm, c.algorithm.replay, c.algorithm.sac
    if not LEARNERS[algorithm.learner].replays:
        return
    got = f"algorithm.learner: got {algorithm.learner}"
    if (ranks := placement.world_size("actor")) > 1:
        yield f"{got} with {ranks} actor ranks, but one has the whole buffer; use cluster.component_placement.actor=0"
    if c.actor.enable_offload:
        yield f"{got} with actor.enable_offload=true, but its critics stay on the device; set it to false"
    if c.actor.fsdp_config.cpu_offload:
        yield f"{got} with actor.fsdp_config.cpu_offload=true, but its critics stay on the device; set it to false"
    if sac.target_critics > sac.num_critics:
        yield (
            f"algorithm.sac.target_critics: got {sac.target_critics}, more than num_critics={sac.num_critics}; use at "
            "most as many"
        )
    numbers = arithmetic(c, placement)
    chunks, ends, train = numbers.samples, numbers.groups * numbers.group_size, c.env.train
    if train.auto_reset:  # episodes end within rollouts, too
        steps = train.max_steps_per_rollout_epoch or train.max_episode_steps
        ends *= 1 + math.ceil(steps / train.max_episode_steps)
    if replay.capacity < chunks + ends:
        yield (
            f"algorithm.replay.capacity: got {replay.capacity}, fewer than the {chunks} chunks of one training step "
            f"and the {ends} states in which its episodes may end; use several times as many, or shorter rollouts "
            "(env.train.max_steps_per_rollout_epoch)"
        )
    if replay.demonstrations is not None and replay.batch_size < 2:
        yield "algorithm.replay.batch_size: got 1, which cannot be shared with demonstrations; use 2 or more"


def eval_envs(c: EmbodiedConfig) -> dict[str, int]:
    """The section that evaluations read, and its number of envs."""
    return {"env.eval" if c.eval_env is None else "eval_env.eval": c.evaluated.eval.total_num_envs}


def lane_problems(c: EmbodiedConfig, placement: Placement, totals: Mapping[str, int]) -> Iterator[str]:
    """Problems of the envs' distribution over workers and stages.

    Args:
        totals: section -> its number of envs.
    """
    env_workers, stages = placement.world_size("env"), c.rollout.pipeline_stage_num
    lanes = env_workers * stages
    for name, total in totals.items():
        if total % lanes:
            yield (
                f"{name}.total_num_envs: got {total}, which does not divide evenly over {env_workers} env workers "
                f"x {stages} pipeline stages; use a multiple of {lanes}"
            )
    if placement.world_size("rollout") > env_workers:
        yield (
            f"cluster.component_placement: got {placement.world_size('rollout')} rollout workers for {env_workers} env "
            "workers; each rollout worker needs an env worker of its own to serve"
        )


def _episode_problems(c: EmbodiedConfig) -> Iterator[str]:
    train, algorithm = c.env.train, c.algorithm
    estimator = None if LEARNERS[algorithm.learner].replays else ADVANTAGES.get(algorithm.adv_type)
    scorers: dict[str, str] = {}  # what scores whole episodes -> how to do without it
    if estimator and estimator.scores_episodes:
        scorers[f"adv_type={algorithm.adv_type}"] = "algorithm=ppo"
    if algorithm.filter_rewards:
        scorers["filter_rewards=true"] = "algorithm.filter_rewards=false"
    if algorithm.positive_nll_coef is not None:
        scorers[f"positive_nll_coef={algorithm.positive_nll_coef}"] = "algorithm.positive_nll_coef=null"
    if train.auto_reset and scorers:
        yield (
            f"env.train.auto_reset: {' and '.join(scorers)} scores one whole episode per env, and with auto_reset a "
            "rollout holds pieces of several, begun at different times; set env.train.auto_reset=false and "
            f"env.train.max_steps_per_rollout_epoch=null, or use {' and '.join(scorers.values())}"
        )
    if train.stagger and not train.auto_reset:
        yield (
            "env.train.stagger: got true, but without env.train.auto_reset all episodes of a rollout begin with it; "
            "set it to false, or env.train.auto_reset=true"
        )
    if train.task_sampling == "success":
        got = "env.train.task_sampling: got success, which draws tasks anew in each step by how the last ones went"
        if train.auto_reset:
            yield f"{got}, but with auto_reset episodes begin at any time; use uniform or a list of weights"
        if train.use_fixed_reset_state_ids:
            yield f"{got}, but use_fixed_reset_state_ids keeps the first draw; use uniform or a list of weights"
        if c.rollout.max_staleness:
            yield (
                f"{got}, but with rollout.max_staleness={c.rollout.max_staleness} a step's episodes begin before the "
                "last ones have ended; use 0, or uniform or a list of weights"
            )
    steps = train.max_steps_per_rollout_epoch
    mend = "set it to null" + ("" if scorers else ", or env.train.auto_reset=true: episodes then go on in the next one")
    if steps is not None and steps > train.max_episode_steps and not train.auto_reset:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, more than max_episode_steps="
            f"{train.max_episode_steps}, but nothing starts a second episode; {mend}"
        )
    if steps is not None and steps < train.max_episode_steps and not train.auto_reset:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, less than max_episode_steps="
            f"{train.max_episode_steps}: episodes would be dropped unfinished; {mend}"
        )
    if steps is not None and steps % c.model.num_action_chunks:
        yield (
            f"env.train.max_steps_per_rollout_epoch: got {steps}, which is not a multiple of "
            f"model.num_action_chunks={c.model.num_action_chunks}"
        )


def arithmetic(c: EmbodiedConfig, placement: Placement) -> Arithmetic:
    """The numbers of a training step: each lane sends its envs' rollout."""
    train, senders = c.env.train, placement.world_size("env") * c.rollout.pipeline_stage_num
    steps = train.max_steps_per_rollout_epoch or train.max_episode_steps
    return Arithmetic(
        groups=train.total_num_envs // c.algorithm.group_size * c.algorithm.rollout_epoch,
        group_size=c.algorithm.group_size,
        chunks=-(-steps // c.model.num_action_chunks),
        num_action_chunks=c.model.num_action_chunks,
        senders=senders,
        rollout_epochs=c.algorithm.rollout_epoch,
        capacity=trajectory_capacity(
            senders=senders, rollout_epochs=c.algorithm.rollout_epoch, ahead=c.rollout.max_staleness
        ),
    )


TASK = Task(
    config=EmbodiedConfig,
    components=("actor", "rollout", "env"),
    rules=embodied_problems,
    arithmetic=arithmetic,
    wiring="embodied_rl.tasks.embodied.run:EmbodiedWiring",
)
