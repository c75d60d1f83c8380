"""What cannot be in the ``algorithm`` section of a task that imitates."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.schema import Config


def imitation_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if c.algorithm.loss_type != "nll":
        yield (
            f"algorithm.loss_type: got {c.algorithm.loss_type!r}, but task={c.runner.task_type} imitates; use "
            "algorithm=sft"
        )
    for key, wanted in (("adv_type", "raw"), ("group_size", 1), ("filter_rewards", False)):
        if getattr(c.algorithm, key) != wanted:
            yield (
                f"algorithm.{key}: got {getattr(c.algorithm, key)!r}, but demonstrations have no rewards; use "
                f"algorithm=sft, which has {wanted!r}"
            )
    if c.algorithm.sampling_params.temperature != 1:
        yield (
            f"algorithm.sampling_params.temperature: got {c.algorithm.sampling_params.temperature}, but the likelihood "
            "of demonstrations is that at temperature 1"
        )
