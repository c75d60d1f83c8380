"""Memory that a run's workers need, by estimate, before any is started."""

from __future__ import annotations

from typing import Any, Final

from embodied_rl.errors import ConfigError
from embodied_rl.plan import RunPlan
from embodied_rl.tasks.trial import count_parameters

GIB: Final = 2**30
PROCESS_BYTES: Final = 0.3 * GIB
"""A worker before it has a model: Python, torch and the project's modules, measured on Linux."""
STATE_TENSORS: Final = {"float32": 4, "bfloat16": 3}
"""Type of the moments -> what the actor has of each parameter, in float32 numbers: weight, gradient and two moments."""


def worker_bytes(
    plan: RunPlan[Any], component: str, parameters: int | None, critic_parameters: int | None = None
) -> float:
    """Bytes that one worker of a component holds, at least: of env workers without the simulator, of others with the
    policy, and of actors with the critic, where their size is known."""
    if component == "env" or parameters is None:
        return PROCESS_BYTES
    weights = 4 * parameters
    if component == "actor":
        shards = 1 if plan.config.actor.fsdp_config.sharding_strategy == "no_shard" else plan.world_size("actor")
        actor, critic = (
            STATE_TENSORS[section.optim.state_dtype] for section in (plan.config.actor, plan.config.critic)
        )
        trained = actor if not plan.config.model.lora.used else 1
        weights = (trained * weights + critic * 4 * (critic_parameters or 0)) // shards
    return PROCESS_BYTES + weights


def check_memory(plan: RunPlan[Any]) -> None:
    """Refuse a run that needs more than ``cluster.memory_limit``, whatever lies on accelerators aside.

    Raises:
        ConfigError: it does.
    """
    limit = plan.config.cluster.memory_limit
    if limit is None:
        return
    parameters = count_parameters(plan)
    of_critic = None if plan.trained_critic is None else count_parameters(plan, of_critic=True)
    needed = {
        component: sum(
            worker_bytes(plan, component, parameters, of_critic)
            if plan.placement.device(component, rank) == "cpu"
            else PROCESS_BYTES
            for rank in range(plan.world_size(component))
        )
        for component in plan.placement.slots
    }
    if (total := sum(needed.values())) > limit * GIB:
        of_each = ", ".join(f"{component} {size / GIB:.1f}" for component, size in needed.items())
        raise ConfigError(
            [
                f"cluster.memory_limit: got {limit:g}, but by estimate the workers need at least {total / GIB:.1f} GiB "
                f"({of_each}), simulators not counted; give them more, or use fewer workers or a smaller policy"
            ]
        )
