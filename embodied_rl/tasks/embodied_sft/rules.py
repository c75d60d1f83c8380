"""Rules and arithmetic of ``task=embodied_sft``."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.demonstrations.mixture import shares_of
from embodied_rl.plan import Arithmetic
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import DaggerConfig, EmbodiedSftConfig
from embodied_rl.tasks.embodied.rules import adapter_problems, eval_envs, lane_problems
from embodied_rl.tasks.rules import imitation_problems
from embodied_rl.tasks.task import Task, trajectory_capacity


def embodied_sft_problems(c: EmbodiedSftConfig, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    yield from imitation_problems(c)
    yield from adapter_problems(c)
    yield from _mixture_problems(c)
    if c.algorithm.rollout_epoch != 1:
        yield (
            f"algorithm.rollout_epoch: got {c.algorithm.rollout_epoch}, but a step's demonstrations are drawn at once; "
            "raise data.batch_size instead"
        )
    if placement is None:
        return
    yield from lane_problems(c, placement, eval_envs(c))
    if placement.world_size("actor") > c.data.batch_size:
        yield (
            f"cluster.component_placement: got {placement.world_size('actor')} actor ranks for data.batch_size="
            f"{c.data.batch_size} samples a step; use fewer ranks or more samples"
        )


def _mixture_problems(c: EmbodiedSftConfig) -> Iterator[str]:
    weights, folders = c.data.weights, len(c.data.paths)
    if weights is None:
        return
    rounds = isinstance(c, DaggerConfig)
    if len(weights) != folders + rounds:
        wanted = f"{folders}, one for each folder of data.path"
        yield f"data.weights: got {len(weights)}, expected {wanted}{' and one for what all rounds add' * rounds}"
    elif len(weights) == 1:
        yield "data.weights: got one for a single folder of data.path, which is all there is; leave it out"
    elif not all(shares := shares_of(weights, c.data.batch_size)):
        yield (
            f"data.weights: {weights[shares.index(0)]:g} of {sum(weights):g} is none of data.batch_size="
            f"{c.data.batch_size} frames; raise the weight or the batch"
        )


def arithmetic(c: EmbodiedSftConfig, placement: Placement) -> Arithmetic:
    """The numbers of a training step: each sample a group of its own, and each actor rank's in one message."""
    del placement
    return Arithmetic(
        groups=c.data.batch_size,
        group_size=1,
        chunks=1,
        num_action_chunks=c.model.num_action_chunks,
        senders=1,
        # Room for all that is read ahead: no worker waits here, so it can serve an evaluation at any time.
        capacity=trajectory_capacity(senders=1, ahead=c.data.prefetch),
    )


TASK = Task(
    config=EmbodiedSftConfig,
    components=("actor", "rollout", "env"),
    rules=embodied_sft_problems,
    arithmetic=arithmetic,
    wiring="embodied_rl.tasks.embodied_sft.run:EmbodiedSftWiring",
    imitates=True,
)
