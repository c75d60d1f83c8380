"""What cannot be in a configuration of ``task=math`` or ``task=sft``."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.checks.imitation import imitation_problems
from embodied_rl.data.prompts import DATASETS, dataset_params
from embodied_rl.errors import ConfigError
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import MathConfig, SftConfig


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
    yield from _loss_problems(c)
    yield from _data_problems(c)
    if placement:
        prompts = c.data.rollout_batch_size
        for component in ("actor", "rollout"):
            if placement.world_size(component) > prompts:
                yield (
                    f"cluster.component_placement: got {placement.world_size(component)} {component} workers for "
                    f"data.rollout_batch_size={prompts} prompts; a prompt's completions are never split, so use fewer "
                    "workers or more prompts"
                )


def _data_problems(c: MathConfig) -> Iterator[str]:
    if c.data.dataset not in DATASETS:  # a module of the user's may import anything, so a worker loads it
        return
    try:
        dataset_params(c.data.dataset, c.data.params, imitation=isinstance(c, SftConfig))
    except ConfigError as error:
        yield from error.problems


def _loss_problems(c: MathConfig) -> Iterator[str]:
    if not isinstance(c, SftConfig):
        if c.algorithm.loss_type == "nll":
            yield "algorithm.loss_type: nll imitates demonstrations; use task=sft, or another loss for task=math"
        return
    yield from imitation_problems(c)
