"""Memory that a run's workers need, by estimate, before any is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from embodied_rl.envs.base import adapter_class
from embodied_rl.errors import ConfigError
from embodied_rl.models.footprint import Footprint
from embodied_rl.plan import RunPlan
from embodied_rl.schema import CollectConfig, EmbodiedConfig
from embodied_rl.tasks.trial import count_parameters, count_soft_critics, measure_policy

GIB: Final = 2**30
_MIB: Final = 2**20
_PROCESS: Final = {"driver": 290 * _MIB, "env": 250 * _MIB, "rollout": 260 * _MIB, "actor": 270 * _MIB}
"""A process before it has a model or a simulator: Python, torch and the project's modules, measured on Linux with torch
2.13 for CPUs."""
_SHARDS: Final = 75 * _MIB
"""What an actor imports to save checkpoints, or to share weights with others."""
_LANGUAGE: Final = 150 * _MIB
"""What transformers and tokenizers add to each, and what counts their operations."""
_GRADIENT_AND_MOMENTS: Final = {"float32": 3, "bfloat16": 2, "int8": 1.5 + 2 / 256}
"""Type of the moments -> what training adds to each number that is trained, in numbers of its own type, float32."""
_COPIES: Final = 2
"""Of what is recorded: as messages, and as the batch or the trajectory that is made of them."""
_OUTCOME: Final = 9
"""Bytes of a chunk's reward, of what weighs its future, and of whether there is a chunk."""
_BUCKETS: Final = {"rollout": 3, "actor": 2}
"""Buckets of a weight sync that a worker maps or copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that one process holds at most."""

    process: float
    weights: float = 0.0
    """With gradients and Adam's moments, in the actor."""
    passes: float = 0.0
    """What passes through the policy keep, and samples that wait for theirs."""
    simulator: float = 0.0
    sync: float = 0.0
    """Weights on their way."""
    buffer: float = 0.0
    """A full replay buffer, in host memory."""
    snapshot: float = 0.0
    """Its copy, while that is written into a checkpoint."""
    missing: str | None = None
    """What comes on top and is not known."""

    @property
    def total(self) -> float:
        held = self.process + self.weights + self.passes + self.simulator + self.sync
        return held + self.buffer + self.snapshot


class Estimate:
    """Of every process of a run."""

    def __init__(self, plan: RunPlan[Any]) -> None:
        self._plan = plan
        self._policy: Footprint | None = measure_policy(plan)
        self.parameters: int | None = count_parameters(plan)
        """Numbers in the policy; None: its size is known when the env is."""
        self._critic: Footprint | None = None
        self._critic_parameters = 0
        if plan.trained_critic is not None:
            self._critic = measure_policy(plan, of_critic=True)
            self._critic_parameters = count_parameters(plan, of_critic=True) or 0

    def of(self, component: str) -> Need:
        """One worker of a component, or ``driver``."""
        language = 0 if self._acts else _LANGUAGE
        process = _PROCESS.get(component, _PROCESS["env"]) + language
        if component == "actor" and (self._plan.config.runner.save_interval > 0 or self._plan.world_size("actor") > 1):
            process += _SHARDS
        if component == "driver":
            return Need(process=process)
        if component == "env":
            simulator = self._simulator()
            missing = "the simulator" if simulator is None else None
            return Need(process=process, simulator=simulator or 0.0, missing=missing)
        if component not in _PROCESS:
            return Need(process=process, missing="what it plays with")
        return self._with_policy(component, process)

    @property
    def _acts(self) -> bool:
        return hasattr(self._plan.config, "env")

    def _with_policy(self, component: str, process: float) -> Need:
        plan, policy = self._plan, self._policy
        if policy is None:
            known = self.parameters is not None
            weights: float = 4 * (self.parameters or 0) * (1 + self._added * self._trains_all(component))
            if component == "actor":
                weights += 4 * self._critic_parameters * (1 + self._added_to_critic)
            missing = "what passes keep" if known else "the policy, whose size the env decides"
            return Need(process=process, weights=weights, missing=missing)
        numbers, workers = plan.training, plan.world_size(component)
        samples = 0 if numbers is None else -(-numbers.samples // workers)
        waiting = _COPIES * policy.recorded * samples
        sync = _BUCKETS[component] * min(policy.trained, plan.config.actor.sync_bucket_mb * _MIB)
        if component == "rollout":
            rows = self._acting_rows()
            weights = self._rounded(policy, plan.config.rollout.dtype)
            return Need(process=process, weights=weights, passes=waiting + rows * policy.widest, sync=sync)
        sharding = plan.config.actor.fsdp_config.sharding_strategy
        shards = workers if sharding == "full_shard" else 1
        weights, saved = policy.weights + self._added * policy.trained, policy.saved
        if self._critic is not None:
            weights += self._critic.weights + self._added_to_critic * self._critic.trained
            saved = max(saved, self._critic.saved)  # they take turns
        if plan.config.algorithm.kl_beta > 0 and not plan.config.model.lora.leave_base:
            weights += self._rounded(policy, plan.config.actor.reference_dtype)
        if plan.replays:
            return self._replaying(policy, Need(process=process, weights=weights, passes=waiting, sync=sync))
        passes = waiting + self._training_rows(samples) * saved
        return Need(process=process, weights=weights / shards, passes=passes, sync=sync)

    def _replaying(self, policy: Footprint, need: Need) -> Need:
        """The same actor with its replay buffer, the critics beside it, and the passes of a batch."""
        algorithm, runner = self._plan.config.algorithm, self._plan.config.runner
        whole, trained = count_soft_critics(self._plan) or (0, 0)
        # What is recorded of a decision is as long as the action.
        buffer = algorithm.replay.capacity * (policy.recorded + _OUTCOME)
        return replace(
            need,
            weights=need.weights + 4 * (whole + self._added_to_critic * trained),
            passes=need.passes + algorithm.replay.batch_size * policy.saved,
            buffer=buffer,
            snapshot=buffer if runner.saves and "optimizer" in runner.save_contents else 0.0,
        )

    def _rounded(self, policy: Footprint, dtype: str | None) -> int:
        """Bytes of a copy of the policy in a type of 16 bits, or as it is."""
        return policy.weights if dtype is None else min(policy.weights, 2 * (self.parameters or 0))

    @property
    def _added(self) -> float:
        return _GRADIENT_AND_MOMENTS[self._plan.config.actor.optim.state_dtype]

    @property
    def _added_to_critic(self) -> float:
        return _GRADIENT_AND_MOMENTS[self._plan.config.critic.optim.state_dtype]

    def _trains_all(self, component: str) -> bool:
        return component == "actor" and not self._plan.config.model.lora.used

    def _acting_rows(self) -> int:
        """Observations, or completions, that one rollout worker answers at once."""
        config, workers = self._plan.config, self._plan.world_size("rollout")
        if not self._acts:
            return config.rollout.max_batch_size
        served = -(-self._plan.lanes.env_workers // workers)
        rows = served * config.env.train.total_num_envs // max(1, len(self._plan.lanes.all()))
        return min(rows, config.rollout.micro_batch_size or rows)

    def _training_rows(self, samples: int) -> int:
        """Samples of a rank's pass with gradient, at most."""
        actor, algorithm = self._plan.config.actor, self._plan.config.algorithm
        rows = -(-samples // (algorithm.n_minibatches or 1))
        if actor.global_batch_size is not None:
            rows = min(samples, -(-actor.global_batch_size // self._plan.world_size("actor")))
        return rows if actor.micro_batch_size == "auto" else min(rows, actor.micro_batch_size)

    def _simulator(self) -> float | None:
        """Of one env worker; None where its adapter does not say."""
        config = self._plan.config
        if not isinstance(config, EmbodiedConfig) or isinstance(config, CollectConfig):
            return None
        says = getattr(adapter_class(config.env.env_type), "memory_of", None)
        if says is None:
            return None
        envs = config.env.train.total_num_envs // self._plan.world_size("env")
        tasks = None if config.env.task_ids is None else len(config.env.task_ids)
        return says(self._plan.env_params, envs=envs // config.algorithm.group_size, tasks=tasks)


def check_memory(plan: RunPlan[Any]) -> None:
    """Refuse a run that needs more than ``cluster.memory_limit``, whatever lies on accelerators aside.

    Raises:
        ConfigError: it does.
    """
    limit = plan.config.cluster.memory_limit
    if limit is None:
        return
    estimate = Estimate(plan)
    needed: dict[str, float] = {}
    for component in plan.placement.slots:
        need = estimate.of(component)
        here = [plan.placement.device(component, rank) == "cpu" for rank in range(plan.world_size(component))]
        # What passes keep is freed between phases, so not all is held at once.
        fixed = need.process + need.simulator + need.buffer + need.snapshot
        needed[component] = sum(fixed + need.weights * on_cpu for on_cpu in here)
    if (total := sum(needed.values())) > limit * GIB:
        of_each = ", ".join(f"{component} {size / GIB:.1f}" for component, size in needed.items())
        raise ConfigError(
            [
                f"cluster.memory_limit: got {limit:g}, but by estimate the workers need at least {total / GIB:.1f} GiB "
                f"({of_each}); give them more, or use fewer workers or a smaller policy"
            ]
        )
