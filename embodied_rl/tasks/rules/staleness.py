"""What cannot be where rollouts run ahead of the updates."""

from __future__ import annotations

from collections.abc import Iterator

from embodied_rl.schema import Config, EmbodiedConfig, MathConfig


def staleness_bound(c: EmbodiedConfig | MathConfig) -> int:
    """The most updates that the weights of a training step's rollout may be behind.

    The last step before a weight sync has weights of the sync before.
    """
    return max(c.rollout.max_staleness, c.runner.weight_sync_interval - 1)


def staleness_problems(c: Config) -> Iterator[str]:
    """Each problem: what was got, why it cannot be, and what to do."""
    if not isinstance(c, EmbodiedConfig | MathConfig):
        return
    bound, interval = c.rollout.max_staleness, c.runner.weight_sync_interval
    if c.rollout.interruptible and not bound:
        yield "rollout.interruptible: got true, but with rollout.max_staleness=0 no weights come in a rollout's middle"
    if not bound:
        return
    got = f"rollout.max_staleness: got {bound}"
    if c.cluster.backend == "serial":
        yield f"{got}, but with cluster=serial nothing happens at the same time; use cluster=process, or 0"
    if bound < interval - 1:
        yield (
            f"{got}, but with runner.weight_sync_interval={interval} weights get {interval - 1} updates old; use at "
            f"least {interval - 1}"
        )
    if c.algorithm.max_resample_rounds:
        yield (
            f"{got} with algorithm.max_resample_rounds={c.algorithm.max_resample_rounds}, but when it is known whether "
            "groups are missing the next rollout has begun; set one of them to 0"
        )
    for component in ("actor", "rollout"):
        if getattr(c, component).enable_offload:
            yield (
                f"{got} with {component}.enable_offload=true, by which actor and rollout take turns, but they are to "
                "work at the same time; set one of them to 0 or false"
            )
