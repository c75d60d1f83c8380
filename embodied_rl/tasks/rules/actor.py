"""What cannot be in any task's ``actor`` section."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.models.registry import LANGUAGE_MODELS
from embodied_rl.runtime.placement import Placement
from embodied_rl.schema import Config


def actor_problems(c: Config, placement: Placement | None) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do.

    Args:
        placement: None where it could not be read, which was said already.
    """
    fsdp = c.actor.fsdp_config
    if fsdp.sharding_strategy == "hybrid_shard":
        if fsdp.fsdp_size is None:
            yield (
                "actor.fsdp_config.fsdp_size: got null, but sharding_strategy=hybrid_shard needs the number of ranks "
                "that share a replica; set it to a divisor of the actor's ranks"
            )
        elif placement and placement.world_size("actor") % fsdp.fsdp_size:
            yield (
                f"actor.fsdp_config.fsdp_size: got {fsdp.fsdp_size}, which does not divide the "
                f"{placement.world_size('actor')} actor ranks into groups of equal size"
            )
    ranks = placement.world_size("actor") if placement else 1
    if c.actor.micro_batch_size == "auto" and ranks > 1:
        yield (
            f"actor.micro_batch_size: got auto with {ranks} actor ranks, but where one runs out of memory the others "
            "would wait for it; use a number, such as what one rank finds (actor/micro_batch_size)"
        )
    if c.actor.micro_batch_size == "auto" and c.actor.max_tokens_per_micro_batch is not None:
        yield (
            f"actor.max_tokens_per_micro_batch: got {c.actor.max_tokens_per_micro_batch} with micro_batch_size=auto; "
            "both say how much goes through the network at once: set one of them"
        )
    if c.actor.enable_offload and fsdp.cpu_offload:
        yield (
            "actor.enable_offload: got true with actor.fsdp_config.cpu_offload=true, which keeps all in host memory at "
            "all times; set one of them"
        )
    if c.actor.max_tokens_per_micro_batch is not None and c.model.model_type not in LANGUAGE_MODELS:
        yield (
            f"actor.max_tokens_per_micro_batch: got {c.actor.max_tokens_per_micro_batch}, but the samples of "
            f"model_type={c.model.model_type} are all of one length; use actor.micro_batch_size"
        )
