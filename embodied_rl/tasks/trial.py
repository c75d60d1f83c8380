"""A trial before any worker starts: the policy is built as the workers will build it, but of tensors without memory,
and of files of weights only the headers are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from embodied_rl.checkpoints.policy_record import PolicyRecord
from embodied_rl.envs.base import known_spaces
from embodied_rl.errors import CheckpointError, UserError, listed
from embodied_rl.evaluation import views
from embodied_rl.models.base import Policy, PolicySpec, Truncation, refuse_truncation, require_reparameterized
from embodied_rl.models.footprint import Footprint, footprint
from embodied_rl.models.registry import LANGUAGE_MODELS, MODELS, policy_class, policy_of
from embodied_rl.models.residual import ResidualParams
from embodied_rl.models.weights.folder import headers_only, shaping
from embodied_rl.models.weights.look import CONFIG_FILE, read_json
from embodied_rl.params import OF_GREEDY_ACTIONS, argument, jsonable, parse_params
from embodied_rl.plan import RunPlan
from embodied_rl.schema import ActionModelConfig, CollectConfig, EmbodiedConfig, MathConfig, ModelConfig


def try_policy(plan: RunPlan[Any]) -> None:
    """See that the model serves the env, and that the weights in ``model.path`` are the model's.

    What is left to the workers: a model from outside, since nobody knows what building it costs; an env whose shapes
    only the simulator knows; a language model's folder, which transformers reads as a whole.

    Raises:
        UserError: as :func:`policy_of` and :meth:`Policy.truncate`, or there are none that the model could start from.
    """
    policy, config = _build(plan), plan.config
    given = config.model.path or plan.start.initial or plan.start.resumed
    if policy is not None and policy.needs_weights and not given:
        raise UserError(
            f"model.path: got null, but model_type={config.model.model_type} builds on a policy that is there; give "
            "its folder of weights"
        )
    if plan.trained_critic is not None:
        try:
            _build(plan, of_critic=True)
        except UserError as error:
            raise UserError(f"critic: {error}") from error
    if not isinstance(config, EmbodiedConfig):
        return
    if plan.replays and policy is not None:
        require_reparameterized(policy, config.model.model_type)
    sampling = config.algorithm.sampling_params
    truncation, model = Truncation(top_p=sampling.top_p, top_k=sampling.top_k), policy_class(config.model.model_type)
    if policy is not None:
        policy.truncate(truncation)
    elif not (model.truncates or model.takes_choices):  # whether a model draws choices hangs on the env
        refuse_truncation(model, truncation)


def try_checkpoints(plan: RunPlan[Any]) -> None:
    """See that the weights of the checkpoints that the run starts from are the model's, and mean the same in it; of
    undamaged ones, since the headers of damaged ones say anything.

    Raises:
        CheckpointError: they are another model's.
    """
    initial, resumed = plan.start.initial, plan.start.resumed
    if initial is None and resumed is None:
        return
    from embodied_rl.checkpoints import shards  # imports torch's distributed part

    for checkpoint in filter(None, (initial, resumed)):
        _check_params(plan, checkpoint)
    adapted = initial is not None and shards.has_adapters(initial)

    def check_bare(policy: Policy) -> None:
        if initial is not None and not adapted:
            with torch.device("cpu"):
                shards.check_weights(policy, initial)

    policy = _build(plan, check_bare)
    if policy is not None and initial is not None and adapted:
        shards.check_weights(policy, initial)
    if policy is not None and resumed is not None:
        shards.check_weights(policy, resumed, exactly=True)


def _check_params(plan: RunPlan[Any], checkpoint: Path) -> None:
    """See that weights mean here what they meant where they were saved, also where all shapes are alike.

    Folders of published families are used with options of another run on purpose.
    """
    config, model = plan.config.model, policy_class(plan.config.model.model_type)
    try:
        saved = PolicyRecord.read(checkpoint).model
        if model.loading_keys and (config.path or saved.path):
            return
        there = parse_params(model.Params, saved.params, "model.params")
    except UserError:  # of an earlier version, which says nothing of it, or other options
        return
    before, now = (shaping(params, asdict(params)) for params in (there, plan.model_params))
    if others := [f"{name} {before[name]!r} there, {now[name]!r} here" for name in now if before[name] != now[name]]:
        raise CheckpointError(
            f"{checkpoint}: its weights are of model_type={config.model_type} with other model.params: "
            f"{listed(others, separator='; ')}. Set them as they were"
        )


def acts_otherwise(plan: RunPlan[Any]) -> list[str]:
    """Warnings: options of acting, such as ``spread``, with which the weights that a run starts from were trained, and
    which this run leaves at their defaults."""
    now, prefix, said = plan.model_params, "model.params", []
    residual = isinstance(now, ResidualParams)
    if residual:
        prefix = "model.params.base_params"
        now = parse_params(policy_class(now.base).Params, now.base_params, prefix)
    decisive = [field for field in fields(now) if field.metadata == OF_GREEDY_ACTIONS]
    for source, params in _made_with(plan) if decisive else ():
        then = params.get("base_params", params) if residual else params  # a folder may be the base's own
        for field in decisive:
            was, here = then.get(field.name, field.default), jsonable(getattr(now, field.name))
            if was != field.default and here == field.default:
                key = f"{prefix}.{field.name}"
                said.append(
                    f"{source}: its weights were trained with {argument(key, was)}, and this run acts with "
                    f"{argument(key, here)}, which is another policy; set {argument(key, was)} to play what was trained"
                )
    return said


def _made_with(plan: RunPlan[Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where the weights that a run starts from are, and their ``model.params`` as far as they are known."""
    checkpoints = [path for path in (plan.start.initial, plan.start.resumed) if path is not None]
    folder = plan.config.model.path
    try:
        for checkpoint in checkpoints:
            yield checkpoint, PolicyRecord.read(checkpoint).model.params
        if not checkpoints and folder is not None:
            found = read_json(Path(folder) / CONFIG_FILE).get("params")
            yield Path(folder), found if isinstance(found, dict) else {}
    except UserError:  # whoever loads them says what is wrong
        return


def count_parameters(plan: RunPlan[Any], *, of_critic: bool = False) -> int | None:
    """Numbers in the policy or the critic, or in the files of a language model's folder; None where that cannot be
    known before the env is built."""
    policy, path = _build(plan, of_critic=of_critic), _model(plan, of_critic).path
    if policy is not None:
        return sum(parameter.numel() for parameter in policy.parameters())
    files = [] if path is None else [file for file in Path(path).glob("*.safetensors") if file.name != views.FILE]
    return sum(sum(_elements(file)) for file in files) or None


def measure_policy(plan: RunPlan[Any], *, of_critic: bool = False) -> Footprint | None:
    """What the policy, or the critic, and its passes take; None where it, or a pass, needs more than shapes."""
    policy = _build(plan, of_critic=of_critic)
    if policy is None:
        return None
    lengths = None
    if isinstance(plan.config, MathConfig):
        lengths = (plan.config.data.max_prompt_length, plan.config.rollout.max_new_tokens)
    try:
        return footprint(policy, lengths)
    except Exception:  # whatever a policy from outside does
        return None


def count_soft_critics(plan: RunPlan[Any]) -> tuple[int, int] | None:
    """Numbers in the critics of ``algorithm.sac``, and how many of them are trained; None where the env decides."""
    policy = _build(plan)
    if policy is None:
        return None
    from embodied_rl.training.soft_critics import SoftCritics

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        critics = list(SoftCritics.of(policy, plan.config.algorithm.sac).parameters())
    return sum(p.numel() for p in critics), sum(p.numel() for p in critics if p.requires_grad)


def _elements(weights: Path) -> Iterator[int]:
    """Numbers in each tensor of a file."""
    with safe_open(weights, framework="numpy") as file:  # torch would map the whole file
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield math.prod(file.get_slice(name).get_shape())


def _model(plan: RunPlan[Any], of_critic: bool) -> ModelConfig:
    return plan.critic if of_critic and plan.critic is not None else plan.config.model


def _build(
    plan: RunPlan[Any], initialize: Callable[[Policy], None] | None = None, *, of_critic: bool = False
) -> Policy | None:
    """The policy, or the critic, without memory; None where that is left to the workers."""
    config, spec = _model(plan, of_critic), _spec(plan)
    if spec is not None and of_critic:
        spec = replace(spec, values_per_chunk=plan.values_per_chunk)
    if spec is None or config.model_type not in MODELS or (config.model_type in LANGUAGE_MODELS and config.path):
        return None
    try:
        with headers_only(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            return policy_of(config, spec, initialize, params=plan.critic_params if of_critic else plan.model_params)
    except (NotImplementedError, RuntimeError):  # what tensors without numbers cannot do, such as a base's SVD
        return None


def _spec(plan: RunPlan[Any]) -> PolicySpec | None:
    """None: not known, or there is no policy."""
    config = plan.config
    if isinstance(config, CollectConfig) and not config.collect.learner_plays:
        return None
    env = getattr(config, "env", None)
    spaces = known_spaces(None if env is None else env.env_type, plan.env_params)
    if spaces.action_dim is None or spaces.state_dim is None or spaces.image_shapes is None:
        return None
    acts = isinstance(config.model, ActionModelConfig)
    return PolicySpec(
        action_dim=spaces.action_dim,
        num_action_chunks=config.model.num_action_chunks if acts else plan.arithmetic.num_action_chunks,
        state_dim=spaces.state_dim,
        image_shapes=spaces.image_shapes,
        action_choices=spaces.action_choices or (),
        values_per_chunk=plan.policy_values,
    )
