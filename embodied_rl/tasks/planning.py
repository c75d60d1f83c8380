"""From a checked configuration to the plan of its run. Starts no worker and builds no model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from embodied_rl.algorithms.catalog import ADVANTAGES, LEARNERS
from embodied_rl.checkpoints import resume
from embodied_rl.checkpoints.store import (
    complete_checkpoints,
    find_checkpoint,
    find_initial,
    newest_whole,
    read_state,
    verify,
)
from embodied_rl.envs.base import adapter_class, known_spaces
from embodied_rl.errors import CheckpointError, ConfigError, UserError
from embodied_rl.models.registry import policy_class
from embodied_rl.models.weights.loading import Loading, check_loading, merged
from embodied_rl.models.weights.look import check_checkpoint, check_folder
from embodied_rl.params import at, parse_params
from embodied_rl.plan import Lanes, RunPlan, Start
from embodied_rl.runtime.load import usable_cores
from embodied_rl.runtime.placement import NodeSlots, Placement, PlacementError, count_accelerators, parse_placement
from embodied_rl.schema import Config, EmbodiedConfig, EmbodiedSftConfig, EnvConfig, MathConfig, ModelConfig
from embodied_rl.schema.runner import NodeGroupConfig
from embodied_rl.tasks.rules import AUTO, at_work_in_updates, staleness_bound, weight_plane
from embodied_rl.tasks.table import TASKS

SHARING = ("env", "collector")
"""Components whose workers may outnumber the accelerators."""
_OF_A_RUN = 3
"""Parts of a checkpoint's path: its run's directory, ``checkpoints``, its own."""
_SLOTS_HERE = 64
"""Ranks of a run on one node of Ray's: no machine of one node is asked for more."""


def node_groups_of(config: Config) -> dict[str, NodeGroupConfig]:
    """The nodes of ``cluster=ray``; where none are given, one like this machine."""
    here = NodeGroupConfig(slots=_SLOTS_HERE, accelerators=count_accelerators())
    return config.cluster.node_groups or {"node": here}


def placement_of(config: Config) -> Placement:
    """Placement of the run's workers.

    Raises:
        PlacementError: as :func:`parse_placement`.
    """
    components, placement = TASKS[config.runner.task_type].components, config.cluster.component_placement
    if placement == AUTO:
        placement = _least(config)
    nodes: list[NodeSlots] = []
    for name, group in node_groups_of(config).items() if config.cluster.backend == "ray" else ():
        for _ in range(group.nodes):
            first = nodes[-1].first + nodes[-1].count if nodes else 0
            nodes.append(NodeSlots(group=name, first=first, count=group.slots, accelerators=group.accelerators))
    return parse_placement(placement, components, sharing=SHARING, nodes=nodes)


def _least(config: Config) -> dict[str, str | int]:
    """What ``component_placement=auto`` starts from: all accelerators, and as few env workers as serve them.

    Raises:
        PlacementError: it does not choose for such a run.
    """
    if config.runner.task_type != "embodied" or config.cluster.backend == "ray":
        got = "cluster=ray" if config.cluster.backend == "ray" else f"task={config.runner.task_type}"
        raise PlacementError(
            f"got auto, which tries env workers of task=embodied on one machine, with {got}; expected ranks, such as "
            "cluster.component_placement.actor=0"
        )
    count = 1 if config.cluster.backend == "serial" else max(1, count_accelerators())
    return {"actor,rollout,env": f"0-{count - 1}"}


def _as_chosen(config: Config, start: Start) -> Config:
    """A run with ``component_placement=auto`` in the layout that it had when the checkpoint that it goes on from was
    saved.

    Raises:
        ConfigError: there is no telling, or it no longer serves.
    """
    key = "cluster.component_placement: got auto"
    if start.resumed is None:
        if config.runner.only_eval:
            raise ConfigError([f"{key} for an evaluation, which trains nothing to be measured; give ranks"])
        return config
    file = resume.config_of_checkpoint(start.resumed)
    if file is None:
        raise ConfigError([f"{key}, but {start.resumed} has no {resume.CONFIG_FILE} of its run beside it; give ranks"])
    saved = resume.read_config(file)
    threads = {**config.cluster.num_threads, "actor": at(saved, "cluster.num_threads.actor")}
    ranks = at(saved, "cluster.component_placement")
    cluster = replace(config.cluster, component_placement=ranks, num_threads=threads)
    rollout = replace(config.rollout, pipeline_stage_num=at(saved, "rollout.pipeline_stage_num"))  # type: ignore[attr-defined]
    chosen = replace(config, cluster=cluster, rollout=rollout)
    try:
        problems = list(TASKS[config.runner.task_type].rules(chosen, placement_of(chosen)))
    except PlacementError as error:
        problems = [str(error)]
    if problems:
        raise ConfigError([f"{key}, which keeps what {file} has: {problem}" for problem in problems])
    return chosen


def threads_of(config: Config, placement: Placement) -> dict[str, int]:
    """Component -> threads of each of its workers.

    With ``auto`` the actor's ranks share the cores; those of workers that act or read ahead during an update are left.
    """
    given = config.cluster.num_threads
    threads = {component: int(count) for component, count in given.items() if count != AUTO}
    if given.get("actor") == AUTO:
        working = {*at_work_in_updates(config)} & {*placement.slots}
        busy = sum(threads[name] * placement.world_size(name) for name in working)
        threads["actor"] = max(1, (int(usable_cores()) - busy) // placement.world_size("actor"))
    return threads


def plan_of(config: Config) -> RunPlan[Any]:
    """Work out the run.

    Raises:
        CheckpointError: there is no checkpoint where the configuration says, or one of another model.
        ConfigError: ``model.params``, or ``init_params`` of an env, are not what the model or the env takes, or the
            demonstrations do not fit the env.
        UserError: there is no such model or env, the model cannot serve the env, or ``model.path`` does not fit it.
    """
    start = _start(config)  # first: a wrong path is known before torch is imported
    if config.cluster.component_placement == AUTO:
        config = _as_chosen(config, start)
    task, placement = TASKS[config.runner.task_type], placement_of(config)
    env, rollout = getattr(config, "env", None), getattr(config, "rollout", None)
    env_params = _env_params(env, "env")
    spaces = known_spaces(None if env is None else env.env_type, env_params)
    if isinstance(config, EmbodiedSftConfig) and not config.runner.only_eval:
        from embodied_rl.demonstrations.fit import check_data  # imports pyarrow

        check_data(config.data, spaces)
    if config.algorithm.bc_coef and config.algorithm.bc_path and not config.runner.only_eval:
        from embodied_rl.demonstrations.fit import check_data, kept_to  # imports pyarrow

        check_data(kept_to(config.algorithm.bc_path), spaces, key="algorithm.bc_path")
    replay = config.algorithm.replay
    replays = LEARNERS[config.algorithm.learner].replays and not config.runner.only_eval
    if env is not None and replays and replay.demonstrations:
        from embodied_rl.demonstrations.fit import check_data, check_outcomes, kept_to  # imports pyarrow

        continuous = replace(spaces, action_choices=())  # all that a replay buffer learns from
        check_data(kept_to(replay.demonstrations), continuous, key="algorithm.replay.demonstrations")
        check_outcomes(replay.demonstrations, env, key="algorithm.replay.demonstrations")
    here = asdict(spaces) | {"num_action_chunks": getattr(config.model, "num_action_chunks", None)}
    check_folder(config.model, here)
    critic = critic_model(config)
    if critic is not None and critic.path != config.model.path and not config.runner.only_eval:
        try:
            check_folder(critic, here)
        except UserError as error:
            raise UserError(f"critic: {error}") from error
    if start.resumed is not None and not config.runner.only_eval:
        resume.check(start.resumed, resume.compare(start.resumed, config) or [])
    for key, checkpoint in (("runner.resume_dir", start.resumed), ("runner.init_from", start.initial)):
        if checkpoint is not None:
            try:
                check_checkpoint(config.model, checkpoint, key, here)
            except CheckpointError:
                verify(checkpoint)  # a damaged one says anything
                raise
    eval_env = getattr(config, "eval_env", None)
    training = task.arithmetic(config, placement) if task.arithmetic else None
    values = 0
    if training and ADVANTAGES[config.algorithm.adv_type].needs_values:
        values = 1 if config.algorithm.reward_type == "chunk_level" else training.num_action_chunks
    bound = None
    if isinstance(config, EmbodiedConfig | MathConfig) and not task.imitates:
        bound = staleness_bound(config)
    plan: RunPlan[Any] = RunPlan(
        config=config,
        start=start,
        placement=placement,
        threads=threads_of(config, placement),
        lanes=Lanes(
            env_workers=placement.world_size("env") if env is not None else 0,
            stages=getattr(rollout, "pipeline_stage_num", 1),
        ),
        training=training,
        staleness_bound=bound,
        weight_plane=weight_plane(config, placement),
        values_per_chunk=values,
        model_params=parse_params(policy_class(config.model.model_type).Params, config.model.params, "model.params"),
        env_params=env_params,
        eval_env_params=env_params if eval_env is None else _env_params(eval_env, "eval_env"),
        critic=critic,
        critic_params=None
        if critic is None
        else parse_params(policy_class(critic.model_type).Params, critic.params, "critic.params"),
        replays=LEARNERS[config.algorithm.learner].replays and not config.runner.only_eval,
    )
    from embodied_rl.models.attention import check_attention
    from embodied_rl.tasks.memory import check_memory
    from embodied_rl.tasks.trial import try_policy  # imports torch, as the policy's class did

    check_attention(policy_class(config.model.model_type), config.model.attn_implementation)
    for section, model in (("model", config.model), ("critic", critic)):
        if model is not None:
            _check_loading(model, section)
    try_policy(plan)
    check_memory(plan)
    return plan


def critic_model(config: Config) -> ModelConfig | None:
    """The model of a critic of its own: the policy's, but for what ``critic`` says, and trained as a whole."""
    if not config.critic.enable:
        return None
    model, critic = config.model, config.critic
    return ModelConfig(
        model_type=model.model_type,
        path=critic.path or model.path,
        params={**model.params, **critic.params},
        lora=replace(model.lora, rank=0, path=None),
        attn_implementation=model.attn_implementation,
        hf_overrides=merged(model.hf_overrides, critic.hf_overrides),
        revision=critic.revision or (model.revision if critic.path in (None, model.path) else None),
        trust_remote_code=model.trust_remote_code,
        tokenizer_path=model.tokenizer_path,
    )


def _check_loading(config: ModelConfig, section: str) -> None:
    model, loading = policy_class(config.model_type), replace(Loading.of(config), key=section)
    check_loading(model, loading, config.path)
    if config.path is not None:
        model.try_loading(config.path, parse_params(model.Params, config.params, f"{section}.params"), loading)


def _env_params(env: EnvConfig | None, section: str) -> Any:
    if env is None:
        return None
    return parse_params(adapter_class(env.env_type).Params, env.init_params, f"{section}.init_params")


def _start(config: Config) -> Start:
    """The beginning of the run. A checkpoint is looked for once: with ``auto`` the newest may be another one later."""
    resumed, given = find_checkpoint(config), config.runner.resume_dir
    if resumed is not None and config.runner.recover == "auto" and given is not None and Path(given) != resumed:
        resumed = newest_whole(complete_checkpoints(resumed.parent)) or resumed  # or its damage could not be said
    if resumed is not None:
        return start_at(resumed, config)
    initial = find_initial(config)
    return Start(initial=initial, began_with=initial)


def start_at(resumed: Path, config: Config) -> Start:
    """The beginning of a run that goes on from a checkpoint."""
    state = read_state(resumed)
    began_with = None if state.initial is None else Path(state.initial)
    referred = config.algorithm.kl_beta > 0 and not config.runner.only_eval
    reference = _reference(began_with, config) if referred else None
    return Start(step=state.step, resumed=resumed, initial=reference, began_with=began_with or reference)


def _reference(began_with: Path | None, config: Config) -> Path | None:
    """What the reference policy of a run that goes on is made of: the weights that it began with, also where
    ``runner.init_from`` names a folder in which newer ones have come.

    Raises:
        CheckpointError: they are gone.
    """
    if began_with is None or began_with.is_dir():
        return began_with or find_initial(config)
    found = find_initial(config)
    if found is None or found.parts[-_OF_A_RUN:] != began_with.parts[-_OF_A_RUN:]:  # or all results have moved
        raise CheckpointError(
            f"{began_with}: no such directory, but the run began with its weights, which the reference policy "
            "(algorithm.kl_beta) has; put it back, or start a new run with runner.init_from"
        )
    return found
