"""Validation rules for ``task=math`` and ``task=sft``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from embodied_rl.errors import ConfigError, UserError
from embodied_rl.language.datasets.registry import dataset_params
from embodied_rl.language.rewards.functions import REWARD_MODEL, bind_reward, parts_of
from embodied_rl.models.weights.loading import names_code
from embodied_rl.plan import Arithmetic
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import MathConfig, SftConfig
from embodied_rl.tasks.rules import imitation_problems
from embodied_rl.tasks.task import Task, trajectory_capacity


def math_problems(c: MathConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    if c.rollout.min_new_tokens > c.rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens: got {c.rollout.min_new_tokens}, more than max_new_tokens="
            f"{c.rollout.max_new_tokens}"
        )
    if c.reward.overlong_buffer_length > c.rollout.max_new_tokens:
        yield (
            f"reward.overlong_buffer_length: got {c.reward.overlong_buffer_length}, more than rollout.max_new_tokens="
            f"{c.rollout.max_new_tokens}: even an empty completion would be too long"
        )
    if c.algorithm.rollout_epoch != 1:
        yield (
            f"algorithm.rollout_epoch: got {c.algorithm.rollout_epoch}, but a step's completions are generated at "
            "once; raise data.rollout_batch_size instead"
        )
    if c.data.eval_completions > 1 and c.algorithm.sampling_params.temperature_eval == 0:
        yield (
            f"data.eval_completions: got {c.data.eval_completions}, which would all be the same at "
            "algorithm.sampling_params.temperature_eval=0; set that, for example to 1.0, or leave this at 1"
        )
    for key, whole in (("top_p", 1.0), ("top_k", None)):
        value = getattr(c.algorithm.sampling_params, key)
        if value != whole:
            yield (
                f"algorithm.sampling_params.{key}: got {value}, which cuts the action tokens of a policy in an env; "
                f"completions have rollout.{key}={value}"
            )
    yield from _engine_problems(c)
    yield from _loss_problems(c)
    yield from _data_problems(c)
    yield from _reward_problems(c)
    if placement:
        prompts = c.data.rollout_batch_size
        for component in ("actor", "rollout"):
            if placement.world_size(component) > prompts:
                yield (
                    f"cluster.component_placement: got {placement.world_size(component)} {component} workers for "
                    f"data.rollout_batch_size={prompts} prompts; a prompt's completions are never split, so use fewer "
                    "workers or more prompts"
                )


def _engine_problems(c: MathConfig) -> Iterator[str]:
    path = c.model.path
    if c.rollout.backend != "vllm" or not c.model.trust_remote_code or path is None:
        return
    if not Path(path).is_dir() or names_code(Path(path)):  # what a name on the hub has is not known before it is read
        yield (
            f"rollout.backend: got vllm with model.trust_remote_code=true for model.path={path}, but vLLM is given the "
            "policy's config and weights, not code for its network; expected a model of transformers itself: use "
            "rollout.backend=hf, or where the folder needs no code of its own leave the trust out"
        )


def _data_problems(c: MathConfig) -> Iterator[str]:
    try:
        dataset_params(c.data.dataset, c.data.params, imitation=isinstance(c, SftConfig))
    except ConfigError as error:
        yield from error.problems
    except UserError as error:
        yield str(error)


def _reward_problems(c: MathConfig) -> Iterator[str]:
    try:
        parts = parts_of(c.reward.function, c.reward.params)
    except ConfigError as error:
        yield from error.problems
        return
    if c.reward.num_processes and all(part.function == REWARD_MODEL for part in parts):
        yield (
            f"reward.num_processes: got {c.reward.num_processes}, but a reward model works in the worker itself; leave "
            "it out"
        )
    for part in parts:
        if part.function == REWARD_MODEL:  # reward_model.py checks its own
            continue
        try:
            bind_reward(part.function, part.params or {})
        except ConfigError as error:
            yield from error.problems
        except UserError as error:
            yield str(error)


def _loss_problems(c: MathConfig) -> Iterator[str]:
    if not isinstance(c, SftConfig):
        if c.algorithm.loss_type == "nll":
            yield "algorithm.loss_type: nll imitates demonstrations; use task=sft, or another loss for task=math"
        return
    yield from imitation_problems(c)


def arithmetic(c: MathConfig, placement: Placement) -> Arithmetic:
    """The numbers of a training step: each generation worker sends its prompts' completions."""
    senders = placement.world_size("rollout")
    return Arithmetic(
        groups=c.data.rollout_batch_size,
        group_size=c.algorithm.group_size,
        chunks=1,
        num_action_chunks=c.rollout.max_new_tokens,
        senders=senders,
        capacity=trajectory_capacity(senders=senders, ahead=c.rollout.max_staleness),
    )


TASK = Task(
    config=MathConfig,
    components=("actor", "rollout"),
    rules=math_problems,
    arithmetic=arithmetic,
    wiring="embodied_rl.tasks.math.run:MathWiring",
    language=True,
)
SFT_TASK = replace(TASK, config=SftConfig, wiring="embodied_rl.tasks.math.run:SftWiring", imitates=True)
"""``task=sft``: the same rules, which tell the two apart."""
