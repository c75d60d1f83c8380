"""An actor without its workers: policy, shards, optimiser and updates on made-up rollouts, in any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.contracts import EnvObs, TrainBatch, Trajectory
from embodied_rl.models.base import Policy
from embodied_rl.models.weights.trainable import freeze_others
from embodied_rl.schema import Config
from embodied_rl.training.batch import build_train_batch
from embodied_rl.training.demonstrated import Demonstrated
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.scoring import Reference, Scorer, Training
from embodied_rl.training.sharding import checkpoint_blocks, compile_blocks, shard, sum_over_ranks
from embodied_rl.training.update import Updater
from embodied_rl.workers.trajectory import split_by_rank
from tests.configs import config_of
from tests.gathered import full_state_dict
from tests.stand_in import sharded
from tests.training.rollouts import ACTION_DIM, CHUNK, STATE_DIM, rollout, small_policy

GROUPS = 5


@cache
def training_config(algorithm: str, *overrides: str) -> Config:
    """``adam_eps`` is so large that Adam does not blow up differences of rounding where a gradient is almost 0."""
    return config_of(
        f"algorithm={algorithm}",
        "algorithm.group_size=2",
        "algorithm.update_epoch=2",
        "algorithm.n_minibatches=2",
        "actor.optim.lr=0.01",
        "actor.optim.adam_eps=0.001",
        *overrides,
    )


def values_per_chunk(config: Config) -> int:
    if config.algorithm.adv_type != "gae":
        return 0
    return 1 if config.algorithm.reward_type == "chunk_level" else CHUNK


def two_epochs(config: Config) -> list[Trajectory]:
    """A training step's trajectories: 10 envs in groups of 2, two rollout epochs, episodes of different lengths."""
    behaviour = small_policy(values_per_chunk(config), seed=1)
    return [rollout(behaviour, rollout_epoch=epoch, groups_per_epoch=GROUPS) for epoch in range(2)]


class RandomFrames:
    """Twenty made-up frames; of the actions that follow the last ones some are missing."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(3)
        self.state = torch.randn(20, STATE_DIM, generator=rng)
        self.actions = torch.rand(20, CHUNK, ACTION_DIM, generator=rng) - 0.5
        self.valid = torch.arange(20)[:, None] + torch.arange(CHUNK) < 20

    def __len__(self) -> int:
        return len(self.state)

    def sample(self, frames: Tensor) -> tuple[EnvObs, Tensor, Tensor]:
        obs = EnvObs(env_ids=frames, images={}, state=self.state[frames], instructions=("",) * len(frames))
        return obs, self.actions[frames], self.valid[frames]


@dataclass
class Learner:
    """One rank's policy and how it is trained."""

    mesh: DeviceMesh
    config: Config
    make_optimizer: Callable[..., Optimizer] = build_optimizer
    make_policy: Callable[[int], Policy] = small_policy
    device: str = "cpu"
    """Or that of the stand-in accelerator."""
    progress: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world_size, self.rank = self.mesh.size(), self.mesh.get_rank()
        self.policy = self.make_policy(values_per_chunk(self.config))
        if self.config.model.lora.rank:
            torch.manual_seed(0)
            from embodied_rl.models.weights.lora import add_adapters  # peft: seconds, in each process of ranks

            add_adapters(self.policy, self.config.model.lora)
        if self.config.model.trainable:
            freeze_others(self.policy, self.config.model.trainable)
        if self.config.actor.torch_compile:
            compile_blocks(self.policy)
        if self.config.actor.gradient_checkpointing:
            checkpoint_blocks(self.policy)
        self._shard(self.policy)
        self.optimizer = self.make_optimizer(self.policy, self.config.actor.optim)
        self.reference: Reference | None = None
        if self.config.algorithm.kl_beta > 0:
            # Not the policy that is trained: then there is a divergence from the start.
            other = small_policy(values_per_chunk(self.config), seed=2)
            self._shard(other)
            self.reference = Reference(other)
        training = Training(
            policy=self.policy,
            reference=self.reference,
            actor=self.config.actor,
            algorithm=self.config.algorithm,
            device=self.device,
            longest_sequence=4,
            report_progress=self._note,
        )
        shown = None
        if self.config.algorithm.bc_coef:
            shown = Demonstrated(training, RandomFrames(), rank=self.rank, world_size=self.world_size)
        self.scorer, self.updater = Scorer(training), Updater(training, self.optimizer, shown)

    def _shard(self, policy: Policy) -> None:
        if self.device == "cpu":
            shard(policy, self.mesh, self.config.actor.fsdp_config)
        else:
            sharded(policy.to(self.device))

    def _note(self, what: str, done: int, total: int) -> None:
        self.progress.append((what, done, total))

    def batch(self, trajectories: Sequence[Trajectory]) -> TrainBatch:
        """This rank's samples."""
        own = [split_by_rank(trajectory, self.world_size)[self.rank] for trajectory in trajectories]
        kept = self.scorer.score([part for part in own if part is not None], Diagnostics())
        algorithm = self.config.algorithm
        return build_train_batch(kept, algorithm, kl_beta=algorithm.kl_beta, reduce=sum_over_ranks(self.device))[0]

    def update(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        """As the actor does."""
        algorithm = self.config.algorithm
        return self.updater.run(batch, step=step, kl_beta=algorithm.kl_beta if algorithm.kl_in == "loss" else 0.0)

    def train(self, steps: int = 1, first: int = 0) -> dict[str, float]:
        """Updates on the same trajectories; the last one's metrics."""
        batch = self.batch(two_epochs(self.config))
        metrics: dict[str, float] = {}
        for step in range(first, first + steps):
            metrics = self.update(batch, step=step)
        return metrics

    def weights(self) -> dict[str, Tensor]:
        return full_state_dict(self.policy)


# Run in ranks by ``Ranks.run``.


def trained(mesh: DeviceMesh, config: Config, steps: int) -> dict[str, Any]:
    learner = Learner(mesh, config)
    samples = len(learner.batch(two_epochs(config)))
    metrics = learner.train(steps)
    return {"weights": learner.weights(), "metrics": metrics, "samples": samples}


def trained_on(mesh: DeviceMesh, config: Config, trajectories: list[Trajectory]) -> dict[str, Any]:
    learner = Learner(mesh, config)
    batch = learner.batch(trajectories)
    metrics = learner.update(batch, step=0)
    return {"weights": learner.weights(), "metrics": metrics, "samples": len(batch.trainable())}


def encouraged(mesh: DeviceMesh, config: Config) -> dict[str, Any]:
    """Everything that was done is good, so ratios rise."""
    learner = Learner(mesh, config)
    batch = learner.batch(two_epochs(config))
    metrics = learner.update(replace(batch, advantages=torch.ones_like(batch.advantages)), step=0)
    return {"weights": learner.weights(), "metrics": metrics}


def save_and_go_on(mesh: DeviceMesh, config: Config, directory: Path) -> dict[str, Any]:
    """Train a step, save, train another."""
    learner = Learner(mesh, config)
    learner.train(first=0)
    save_actor(learner.policy, learner.optimizer, directory)
    saved = learner.weights()
    learner.train(first=1)
    return {"saved": saved, "after": learner.weights()}


def load_and_go_on(mesh: DeviceMesh, config: Config, directory: Path) -> dict[str, Any]:
    learner = Learner(mesh, config)
    load_actor(learner.policy, learner.optimizer, directory)
    loaded = learner.weights()
    learner.train(first=1)
    return {"loaded": loaded, "after": learner.weights()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of all weights together."""
    assert left.keys() == right.keys()
    difference = torch.cat([(left[name].double() - right[name].double()).flatten() for name in left])
    whole = torch.cat([tensor.double().flatten() for tensor in right.values()])
    return (difference.norm() / whole.norm()).item()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
