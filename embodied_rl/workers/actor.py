"""The actor: collects trajectories, estimates advantages, updates the policy with FSDP2 and publishes its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from embodied_rl.algorithms.normalization import explained_variance, masked_moments, mean_and_variance
from embodied_rl.channel.base import Channel
from embodied_rl.contracts import TrainBatch, Trajectory, WeightUpdate
from embodied_rl.data.batch import build_train_batch
from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.runtime.worker import Worker, WorkerContext
from embodied_rl.schema import ActorConfig, AlgorithmConfig, ModelConfig
from embodied_rl.training import checkpoint
from embodied_rl.training.fsdp import full_state_dict, init_process_group, shard, sum_over_ranks
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What a rank tells the runner about an update; the metrics are equal on all ranks."""

    metrics: dict[str, float]
    seconds: dict[str, float]
    """Phase -> wall seconds."""


class ActorWorker(Worker):
    """One rank of the actor.

    Args:
        model, algorithm, actor: the config's sections.
        expected: trajectory messages to receive in a training step: lanes x rollout epochs.
        rollout_workers: how many get each version of the weights.
        trajectories: keyed by actor rank.
        weights: keyed by rollout rank.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        actor: ActorConfig,
        expected: int,
        rollout_workers: int,
        trajectories: Channel,
        weights: Channel,
    ) -> None:
        super().__init__(context)
        self._model_config, self._algorithm, self._config = model, algorithm, actor
        self._expected, self._rollout_workers = expected, rollout_workers
        self._trajectories, self._weights = trajectories, weights
        self._timer = PhaseTimer()
        self._received: list[Trajectory] = []

    def setup(self, spec: PolicySpec) -> int:
        """Build, shard and equip the policy; returns its number of parameters."""
        context = self.context
        mesh = init_process_group(
            device=context.device, rank=context.rank, world_size=context.world_size, rendezvous=context.rendezvous
        )
        torch.manual_seed(self._config.seed)  # every rank makes the same weights and then keeps its shards
        self._policy: Policy = build_policy(self._model_config.model_type, spec, self._model_config.params)
        self._policy.to(context.device)
        parameters = sum(p.numel() for p in self._policy.parameters())
        shard(self._policy, mesh, self._config.fsdp_config)
        self._optimizer = build_optimizer(self._policy, self._config.optim)
        self._updater = Updater(
            self._policy,
            self._optimizer,
            actor=self._config,
            algorithm=self._algorithm,
            device=context.device,
            world_size=context.world_size,
            report_progress=context.report_progress,
        )
        return parameters

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    async def publish_weights(self, version: int) -> float:
        """Gather the weights and give every rollout worker a copy; returns the seconds it took."""
        with self._timer.phase("sync"):
            state = full_state_dict(self._policy)
            if self.context.rank == 0:
                for rank in range(self._rollout_workers):
                    await self._weights.put(WeightUpdate(version=version, state=state), key=rank)
        return self._timer.drain()["sync"]

    async def receive(self) -> None:
        """Take a training step's trajectories as the env workers finish them."""
        self._received = []
        for _ in range(self._expected):
            part: Trajectory | None = await self._trajectories.get(key=self.context.rank)
            if part is not None:
                self._received.append(part)

    def update(self, *, step: int) -> UpdateReport:
        """Train on what was received."""
        reduce = sum_over_ranks(self.context.device)
        # In one order however the messages came in: floating-point sums depend on it.
        self._received.sort(key=lambda t: (t.rollout_epoch, int(t.env_ids[0])))
        with self._timer.phase("advantage"):
            batch, groups = build_train_batch(self._received, self._algorithm, reduce=reduce)
            statistics = self._statistics(batch)
            statistics |= {name: _ratio(reduce(pair)) for name, pair in groups.items()}
        self._received = []
        self._policy.train()
        with self._timer.phase("update"):
            metrics = self._updater.run(batch, step=step)
        metrics["learning_rate"] = self._config.optim.lr
        return UpdateReport(metrics=metrics | statistics, seconds=self._timer.drain())

    def save(self, directory: Path) -> None:
        """Write this rank's shards into ``directory``."""
        checkpoint.save_actor(self._policy, self._optimizer, directory)

    def load(self, directory: Path, *, weights_only: bool) -> None:
        """Read what :meth:`save` wrote, with any number of ranks."""
        checkpoint.load_actor(self._policy, None if weights_only else self._optimizer, directory)

    def _statistics(self, batch: TrainBatch) -> dict[str, float]:
        """Advantages and returns over the valid units of all ranks."""
        reduce = sum_over_ranks(self.context.device)
        mean, variance = mean_and_variance(reduce(masked_moments(batch.advantages, batch.loss_mask)))
        numbers = {"advantage_mean": mean.item(), "advantage_std": variance.sqrt().item()}
        if batch.returns is not None and batch.values is not None and batch.value_mask is not None:
            mean, variance = mean_and_variance(reduce(masked_moments(batch.returns, batch.value_mask)))
            numbers |= {"return_mean": mean.item(), "return_std": variance.sqrt().item()}
            numbers["explained_variance"] = explained_variance(
                batch.values, batch.returns, batch.value_mask, reduce=reduce
            )
        return numbers


def _ratio(pair: torch.Tensor) -> float:
    return float(pair[0] / pair[1]) if pair[1] else float("nan")
