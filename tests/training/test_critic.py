"""A critic of its own: what it values, what trains it, and what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.algorithms.statistics import Diagnostics
from embodied_rl.checkpoints.shards import has_critic, load_actor, load_critic_weights, load_weights, save_actor
from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.errors import CheckpointError
from embodied_rl.models.base import Evaluation, Policy
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.schema import Config
from embodied_rl.training.batch import build_train_batch
from embodied_rl.training.critic import Critic
from embodied_rl.training.optimizer import build_optimizer
from embodied_rl.training.scoring import Scorer, Training
from embodied_rl.training.sharding import shard, sum_over_ranks
from embodied_rl.training.update import Updater
from embodied_rl.workers.trajectory import split_by_rank
from tests.gathered import full_state_dict
from tests.training.learner import GROUPS, distance, same, training_config
from tests.training.ranks import Ranks
from tests.training.rollouts import CHUNK, STATE_DIM, rollout, small_policy


@cache
def critic_config(*overrides: str) -> Config:
    return training_config(
        "ppo", "critic.enable=true", "critic.optim.lr=0.01", "critic.optim.adam_eps=0.001", *overrides
    )


def unvalued(trajectory: Trajectory, *, ended_at: tuple[tuple[int, int], ...] = ()) -> Trajectory:
    """With the states that nobody acts on: the last one of each env, and after chunk t of env n for each (t, n)."""
    chunks, envs = trajectory.rewards.shape[:2]
    rng = torch.Generator().manual_seed(5)
    rows = torch.full((chunks, envs), -1)
    rows[-1] = 0
    for chunk, env in ended_at:
        rows[chunk, env] = 1
    everyone = torch.randn(2, 100, STATE_DIM, generator=rng)[:, trajectory.env_ids]
    inputs = {"state": everyone, "samples": torch.zeros(2, envs, *trajectory.replay_inputs["samples"].shape[2:])}
    return replace(trajectory, unacted_inputs=inputs, unacted_rows=rows)


def two_epochs() -> list[Trajectory]:
    behaviour = small_policy(seed=1)
    return [
        unvalued(rollout(behaviour, rollout_epoch=epoch, groups_per_epoch=GROUPS, end="truncated"))
        for epoch in range(2)
    ]


class Pair:
    """One rank's policy and critic, and how they are trained."""

    def __init__(self, mesh: DeviceMesh, config: Config, model: Policy | None = None) -> None:
        self.config, self.world_size, self.rank = config, mesh.size(), mesh.get_rank()
        values = 1 if config.algorithm.reward_type == "chunk_level" else CHUNK
        self.policy, model = small_policy(), model or small_policy(values, hidden_size=8, seed=7)
        if config.model.lora.rank:
            from embodied_rl.models.weights.lora import add_adapters

            torch.manual_seed(0)
            add_adapters(self.policy, config.model.lora)
        for network in (self.policy, model):
            shard(network, mesh, config.actor.fsdp_config)
        self.optimizer = build_optimizer(self.policy, config.actor.optim)
        training = Training(
            policy=self.policy,
            actor=config.actor,
            algorithm=config.algorithm,
            device="cpu",
            longest_sequence=4,
            report_progress=lambda *_: None,
        )
        self.scorer, self.updater = Scorer(training), Updater(training, self.optimizer)
        self.critic = Critic(model, config.critic, training, PhaseTimer())

    def batch(self, trajectories: list[Trajectory]) -> TrainBatch:
        parts = [split_by_rank(trajectory, self.world_size)[self.rank] for trajectory in trajectories]
        scored = self.scorer.score([part for part in parts if part is not None], Diagnostics())
        return build_train_batch(self.critic.value(scored), self.config.algorithm, reduce=sum_over_ranks("cpu"))[0]

    def train(self, *steps: int, policy: bool = True) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for step in steps:
            batch = self.batch(two_epochs())
            metrics = self.critic.train(batch, step=step, learning_rate_factor=1.0)
            if policy:
                self.updater.run(replace(batch, values=None, returns=None, value_mask=None), step=step)
        return metrics

    def weights(self) -> dict[str, Tensor]:
        both = (("policy", self.policy), ("critic", self.critic.model))
        return {f"{name}.{key}": t for name, one in both for key, t in full_state_dict(one).items()}

    def of(self, which: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.weights().items() if name.startswith(which)}


class FirstNumber(Policy):
    """A value that can be read off: the first number of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = small_policy(1).spec
        self.value_head = torch.nn.Linear(1, 1)

    def evaluate(self, replay_inputs: Any, *, temperature: float, with_distribution: bool = False) -> Evaluation:
        values = replay_inputs["state"][:, :1] + 0.0 * self.value_head(torch.zeros(1, 1)).sum()
        return Evaluation(logprobs=values[..., None], entropy=values[..., None], values=values)


def test_values_and_advantages_by_hand(mesh: DeviceMesh) -> None:
    """Two envs, three chunks of one valid step each. Env 0 runs through; env 1 is truncated after chunk 1 and reset."""
    config = critic_config("algorithm.gamma=0.5", "algorithm.gae_lambda=0.5", "algorithm.normalize_advantages=false")
    made = rollout(small_policy(), num_envs=2, num_chunks=3, group_size=2, lengths=[9, 9])
    valid = torch.zeros_like(made.valid)
    valid[..., 0] = True
    truncated, terminated = torch.zeros_like(valid), torch.zeros_like(valid)
    truncated[1, 1, 0] = True
    states = torch.zeros(3, 2, STATE_DIM)
    states[:, :, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    last = torch.zeros(2, 2, STATE_DIM)
    last[:, :, 0] = torch.tensor([[7.0, 8.0], [99.0, 10.0]])  # 99 is nobody's
    rewards = torch.zeros_like(made.rewards)
    rewards[..., 0] = 1.0
    trajectory = replace(
        made,
        rewards=rewards,
        valid=valid,
        truncated=truncated,
        terminated=terminated,
        replay_inputs={**made.replay_inputs, "state": states},
        unacted_inputs={"state": last, "samples": torch.zeros(2, 2, *made.replay_inputs["samples"].shape[2:])},
        unacted_rows=torch.tensor([[-1, -1], [-1, 1], [0, 0]]),
    )
    pair = Pair(mesh, config, FirstNumber())
    [valued] = pair.critic.value([trajectory])
    assert valued.values is not None and valued.bootstrap_values is not None
    assert valued.values[..., 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert valued.bootstrap_values.tolist() == [[3, 4], [5, 10], [7, 8]]
    batch = pair.batch([trajectory])
    assert batch.returns is not None
    # Env 0: 1 + 7/2 - 5 = -0.5;  1 + 5/2 - 3 - 0.5/4 = 0.375;  1 + 3/2 - 1 + 0.375/4 = 1.59375
    # Env 1: 1 + 8/2 - 6 = -1;    1 + 10/2 - 4 = 2, cut;        1 + 4/2 - 2 + 2/4 = 1.5
    by_env = torch.tensor([[1.59375, 1.5], [0.375, 2.0], [-0.5, -1.0]])
    found = batch.returns[:, 0] - torch.tensor([1.0, 2, 3, 4, 5, 6])
    torch.testing.assert_close(found, by_env.flatten())


def test_an_episode_cut_off_in_the_rollouts_middle_is_followed_by_the_state_it_stopped_in(mesh: DeviceMesh) -> None:
    """Without a reset the next chunk begins with it, though nothing is done there; after a termination nobody asks."""
    for end, followed in (("truncated", True), ("terminated", False)):
        made = unvalued(rollout(small_policy(), num_envs=2, lengths=[2 * CHUNK, 4 * CHUNK], end=end))  # type: ignore[arg-type]
        [valued] = Pair(mesh, critic_config(), FirstNumber()).critic.value([made])
        assert valued.values is not None and valued.bootstrap_values is not None and made.unacted_inputs is not None
        there = made.replay_inputs["state"][2, 0, 0].item()
        assert valued.bootstrap_values[1, 0].item() == (pytest.approx(there) if followed else 0.0)
        assert valued.values[3, 0].item() == 0.0, "nobody asks for it"
        last = made.unacted_inputs["state"][0, 1, 0].item()
        assert valued.bootstrap_values[3, 1].item() == (pytest.approx(last) if followed else 0.0)


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
def test_values_are_those_of_a_plain_pass_however_it_is_cut(mesh: DeviceMesh, level: str) -> None:
    config = critic_config(f"algorithm.reward_type={level}", "critic.micro_batch_size=7")
    values = 1 if level == "chunk_level" else CHUNK
    pair, plain = Pair(mesh, config), small_policy(values, hidden_size=8, seed=7)
    for trajectory, valued in zip(two_epochs(), pair.critic.value(two_epochs()), strict=True):
        taken = trajectory.valid.any(-1)
        inputs = {key: tensor[taken] for key, tensor in trajectory.replay_inputs.items()}
        expected = plain.evaluate(inputs, temperature=1.0).values
        assert expected is not None and valued.values is not None
        torch.testing.assert_close(valued.values[taken], expected.detach())


def test_neither_reaches_the_others_weights(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, critic_config())
    before, batch = pair.weights(), pair.batch(two_epochs())
    metrics = pair.critic.train(batch, step=0, learning_rate_factor=1.0)
    assert same(pair.of("policy"), {name: t for name, t in before.items() if name.startswith("policy")})
    assert not same(pair.of("critic"), {name: t for name, t in before.items() if name.startswith("critic")})
    assert metrics["critic_optimizer_steps"] == 4 and metrics["critic_grad_norm"] > 0
    assert metrics["critic_learning_rate"] == 0.01
    trained = pair.of("critic")
    found = pair.updater.run(replace(batch, values=None, returns=None, value_mask=None), step=0)
    assert same(pair.of("critic"), trained)
    assert not same(pair.of("policy"), {name: t for name, t in before.items() if name.startswith("policy")})
    assert "value_loss" not in found and "value_loss" in metrics


def test_its_gradient_is_clipped_by_itself(mesh: DeviceMesh) -> None:
    """With plain SGD's length of a step: a limit on the policy's gradient does not hold for it."""
    moved = {}
    for limit in (None, 0.001):
        shown = "null" if limit is None else str(limit)
        config = critic_config(
            f"critic.optim.clip_grad={shown}",
            "actor.optim.clip_grad=1e-9",
            "algorithm.update_epoch=1",
            "algorithm.n_minibatches=1",
        )
        pair = Pair(mesh, config)
        pair.critic._updater._optimizer = torch.optim.SGD(pair.critic.model.parameters(), lr=1.0)
        before = pair.of("critic")
        norm = pair.train(0, policy=False)["critic_grad_norm"]
        after = pair.of("critic")
        moved[limit] = torch.cat([(after[name] - before[name]).flatten() for name in after]).norm().item()
        assert moved[limit] == pytest.approx(norm if limit is None else limit, rel=1e-4)


def test_the_value_loss_is_that_of_a_value_head_without_trunk(mesh: DeviceMesh) -> None:
    """A critic's mean squared error, worked out here, before the first step."""
    config = critic_config("algorithm.update_epoch=1", "algorithm.n_minibatches=1", "algorithm.value_clip=null")
    pair = Pair(mesh, config)
    batch = pair.batch(two_epochs())
    assert batch.values is not None and batch.returns is not None and batch.value_mask is not None
    errors = (batch.values - batch.returns)[batch.value_mask].square().mean() / 2
    metrics = pair.critic.train(batch, step=0, learning_rate_factor=1.0)
    assert metrics["value_loss"] == pytest.approx(errors.item(), rel=1e-5)


def trained_pair(mesh: DeviceMesh, config: Config) -> tuple[dict[str, Tensor], dict[str, float]]:
    pair = Pair(mesh, config)
    metrics = pair.train(0, 1)
    return pair.weights(), metrics


@pytest.mark.parametrize("level", ["chunk_level", "action_level"])
def test_two_ranks_train_as_one(mesh: DeviceMesh, two_ranks: Ranks, level: str) -> None:
    config = critic_config(f"algorithm.reward_type={level}", "critic.micro_batch_size=5")
    alone, metrics = trained_pair(mesh, config)
    assert distance(alone, Pair(mesh, config).weights()) > 1e-2
    [(weights, found), (_, others)] = two_ranks.run(trained_pair, config)
    assert distance(weights, alone) < 1e-5
    assert found == pytest.approx(metrics, rel=1e-4)
    assert found == others


def test_it_learns_as_a_whole_beside_adapters(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, critic_config("model.lora.rank=2"))
    before = pair.weights()
    pair.train(0)
    after = pair.weights()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert {name for name in moved if name.startswith("policy")} == {n for n in after if ".lora_" in n}
    assert any(name.startswith("critic.value_head.") for name in moved)


def saved_and_gone_on(mesh: DeviceMesh, config: Config, directory: Path) -> dict[str, Tensor]:
    pair = Pair(mesh, config)
    pair.train(0)
    save_actor(pair.policy, pair.optimizer, directory, critic=(pair.critic.model, pair.critic.optimizer))
    pair.train(1)
    return pair.weights()


def loaded_and_gone_on(mesh: DeviceMesh, config: Config, directory: Path) -> dict[str, Tensor]:
    pair = Pair(mesh, config, small_policy(1, hidden_size=8, seed=99))
    load_actor(pair.policy, pair.optimizer, directory, critic=(pair.critic.model, pair.critic.optimizer))
    pair.train(1)
    return pair.weights()


def test_it_goes_on_bit_for_bit(mesh: DeviceMesh, two_ranks: Ranks, tmp_path: Path) -> None:
    config = critic_config()
    whole = saved_and_gone_on(mesh, config, tmp_path / "one")
    assert same(loaded_and_gone_on(mesh, config, tmp_path / "one"), whole)
    [spread, _] = two_ranks.run(loaded_and_gone_on, config, tmp_path / "one")
    assert distance(spread, whole) < 1e-5
    [shares, _] = two_ranks.run(saved_and_gone_on, config, tmp_path / "two")
    [again, _] = two_ranks.run(loaded_and_gone_on, config, tmp_path / "two")
    assert same(again, shares)


def test_a_checkpoints_policy_can_be_used_without_its_critic(mesh: DeviceMesh, tmp_path: Path) -> None:
    pair = Pair(mesh, critic_config())
    pair.train(0)
    save_actor(pair.policy, None, tmp_path, critic=(pair.critic.model, None))
    policy, critic = small_policy(seed=3), small_policy(1, hidden_size=8, seed=3)
    load_weights(policy, tmp_path)
    assert has_critic(tmp_path)
    load_critic_weights(critic, tmp_path)
    loaded = {f"policy.{k}": t for k, t in policy.state_dict().items()}
    assert same(loaded | {f"critic.{k}": t for k, t in critic.state_dict().items()}, pair.weights())
    with pytest.raises(CheckpointError, match="holds another critic than this run's"):
        load_critic_weights(small_policy(1, hidden_size=4), tmp_path)


def test_a_checkpoint_without_critic_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    pair = Pair(mesh, critic_config())
    save_actor(pair.policy, pair.optimizer, tmp_path)
    assert not has_critic(tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights of a critic"):
        load_actor(pair.policy, pair.optimizer, tmp_path, critic=(pair.critic.model, pair.critic.optimizer))


def test_a_gradient_that_is_not_finite_is_the_critics(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, critic_config())
    batch = pair.batch(two_epochs())
    assert batch.returns is not None
    batch.returns[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"the critic's gradient's norm is nan.*Lower critic\.optim\.lr"):
        pair.critic.train(batch, step=0, learning_rate_factor=1.0)
    skipping = Pair(mesh, critic_config("critic.optim.skip_nonfinite=true"))
    metrics = skipping.critic.train(batch, step=0, learning_rate_factor=1.0)
    assert metrics["critic_nonfinite_steps"] == 2, "one of two mini-batches in each of two epochs"
    assert all(torch.isfinite(tensor).all() for tensor in skipping.weights().values())


def test_it_learns_what_to_expect(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, critic_config("algorithm.value_clip=null"), small_policy(1, hidden_size=32))
    batch = pair.batch(two_epochs())
    losses = [pair.critic.train(batch, step=step, learning_rate_factor=1.0)["value_loss"] for step in range(40)]
    assert losses[-1] < 0.3 * losses[0]
