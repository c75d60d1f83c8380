from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.contracts import TrainBatch, Trajectory
from embodied_rl.models.flops import SampleCost
from embodied_rl.schema import Config
from embodied_rl.training.nonfinite import sample_name
from tests.training.learner import (
    GROUPS,
    Learner,
    distance,
    encouraged,
    same,
    trained,
    trained_on,
    training_config,
    two_epochs,
    values_per_chunk,
)
from tests.training.ranks import Ranks
from tests.training.rollouts import rollout, small_policy

PPO = "ppo", "algorithm.value_clip=0.2", "algorithm.huber_delta=1.0", "algorithm.entropy_bonus=0.01"
PPO_BY_ACTION = "ppo", "algorithm.reward_type=action_level", "algorithm.logprob_type=action_level"
GRPO = "grpo", "algorithm.entropy_bonus=0.01", "algorithm.entropy_type=chunk_level"
GRPO_BY_CHUNK = "grpo", "algorithm.logprob_type=chunk_level"
WIDE = "algorithm.clip_ratio_low=0.2", "algorithm.clip_ratio_high=0.28"
RECIPES = [
    PPO,
    PPO_BY_ACTION,
    ("ppo", "algorithm.normalize_returns=true", "algorithm.kl_beta=0.1", "algorithm.kl_in=reward"),
    GRPO,
    GRPO_BY_CHUNK,
    ("drgrpo",),
    ("rloo", "algorithm.kl_beta=0.1", "algorithm.entropy_bonus=0.01", "algorithm.loss_agg_func=seq-mean-token-sum"),
    ("reinforce_pp", "algorithm.adv_norm.mean_level=group", "algorithm.kl_beta=0.1", "algorithm.kl_in=reward"),
    ("reinforce_pp", "algorithm.adv_type=raw", "algorithm.reward_norm.std_level=batch"),
    ("gspo", *WIDE, "algorithm.kl_beta=0.1", "algorithm.kl_penalty_type=full"),
    ("aipo", "algorithm.positive_nll_coef=0.3"),
    ("ppo", "algorithm.bc_coef=0.5", "algorithm.bc_path=shown", "algorithm.bc_batch_size=6"),
    ("grpo", "algorithm.bc_coef=0.5", "algorithm.bc_path=shown", "algorithm.bc_batch_size=6"),
    ("ppo", "model.lora.rank=2", "actor.optim.lr=0.03"),
    ("decoupled_ppo", "algorithm.behav_imp_weight_cap=1.1", "algorithm.prox_logp_method=metrics"),
    ("m2po", "algorithm.m2_threshold=0.005", "algorithm.loss_agg_func=seq-mean-token-mean"),
]
IDS = ["-".join(part.removeprefix("algorithm.") for part in recipe)[:60] for recipe in RECIPES]
SMALLEST_MOVE = 1e-2
"""The updates of these tests move the weights by more than this, so 1e-6 says something."""


def sgd(policy: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(policy.parameters(), lr=config.lr)


def untrained(mesh: DeviceMesh, config: Config) -> dict[str, Tensor]:
    return Learner(mesh, config).weights()


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_micro_batch_size_changes_nothing(mesh: DeviceMesh, recipe: tuple[str, ...]) -> None:
    runs = [trained(mesh, training_config(*recipe, f"actor.micro_batch_size={size}"), 1) for size in (1, 3, 10_000)]
    assert distance(runs[0]["weights"], untrained(mesh, training_config(*recipe))) > SMALLEST_MOVE
    for run in runs[1:]:
        assert distance(run["weights"], runs[0]["weights"]) < 1e-6
        assert run["metrics"] == pytest.approx(runs[0]["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_two_ranks_with_uneven_shares_train_as_one(mesh: DeviceMesh, two_ranks: Ranks, recipe: tuple[str, ...]) -> None:
    config = training_config(*recipe, "actor.micro_batch_size=3")
    one = trained(mesh, config, 2)
    first, second = two_ranks.run(trained, config, 2)
    assert first["samples"] != second["samples"]
    assert first["samples"] + second["samples"] == one["samples"]
    assert distance(first["weights"], one["weights"]) < 1e-6
    assert distance(one["weights"], untrained(mesh, config)) > SMALLEST_MOVE
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6)


def plain_training(config: Config, batch: TrainBatch) -> dict[str, Tensor]:
    """Two AdamW steps over the whole batch, written without any of the platform's training code."""
    a, o = config.algorithm, config.actor.optim
    policy = small_policy(values_per_chunk(config))
    matrices = [p for name, p in policy.named_parameters() if name.endswith("weight")]
    others = [p for name, p in policy.named_parameters() if not name.endswith("weight")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=o.lr,
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
    )
    weight = batch.valid.unsqueeze(-1).float().expand(*batch.valid.shape, 2)
    for _ in range(a.update_epoch):
        evaluation = policy.evaluate(batch.replay_inputs, temperature=1.0)
        ratio = torch.exp(evaluation.logprobs - batch.logprobs)
        clipped = torch.clamp(ratio, 1 - a.clip_ratio_low, 1 + (a.clip_ratio_high or a.clip_ratio_low))
        surrogate = -torch.minimum(batch.advantages * ratio, batch.advantages * clipped)
        if a.clip_ratio_c is not None:
            bound = -a.clip_ratio_c * batch.advantages
            surrogate = torch.where(batch.advantages < 0, torch.minimum(surrogate, bound), surrogate)
        loss = (surrogate * weight).sum() / weight.sum()
        loss = loss - a.entropy_bonus * (evaluation.entropy * weight).sum() / weight.sum()
        if batch.returns is not None:
            assert evaluation.values is not None
            loss = loss + a.value_loss_coef * (0.5 * (batch.returns - evaluation.values) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in policy.parameters() if p.grad is not None))  # type: ignore[arg-type]
        for p in policy.parameters():
            if p.grad is not None and o.clip_grad is not None and norm > o.clip_grad:
                p.grad *= o.clip_grad / norm
        optimizer.step()
    return {name: tensor.detach() for name, tensor in policy.state_dict().items()}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_same_as_plain_pytorch(mesh: DeviceMesh, algorithm: str) -> None:
    config = training_config(
        algorithm,
        "algorithm.n_minibatches=1",
        "algorithm.entropy_bonus=0.01",
        "actor.optim.weight_decay=0.1",
        "actor.optim.clip_grad=0.05",
        "actor.micro_batch_size=7",
    )
    learner = Learner(mesh, config)
    batch = learner.batch(two_epochs(config))
    metrics = learner.updater.run(batch, step=0)
    assert metrics["optimizer_steps"] == 2
    assert metrics["grad_norm"] > 0.05, "the gradient is clipped"
    assert distance(learner.weights(), plain_training(config, batch)) < 1e-6
    assert distance(learner.weights(), untrained(mesh, config)) > SMALLEST_MOVE


def with_rubbish(trajectory: Trajectory) -> Trajectory:
    """Other numbers wherever nothing was done."""
    idle = ~trajectory.valid
    idle_chunks = idle.all(-1)
    samples = trajectory.replay_inputs["samples"].masked_fill(idle.unsqueeze(-1), 3.0)
    states = trajectory.replay_inputs["state"].masked_fill(idle_chunks.unsqueeze(-1), torch.nan)
    return replace(
        trajectory,
        rewards=trajectory.rewards.masked_fill(idle, 50.0),
        logprobs=trajectory.logprobs.masked_fill(idle.unsqueeze(-1), torch.nan),
        values=None if trajectory.values is None else trajectory.values.masked_fill(idle_chunks.unsqueeze(-1), 9.0),
        replay_inputs={"samples": samples, "state": states},
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_what_is_masked_has_no_influence(mesh: DeviceMesh, recipe: tuple[str, ...]) -> None:
    config = training_config(*recipe)
    clean = trained_on(mesh, config, two_epochs(config))
    dirty = trained_on(mesh, config, [with_rubbish(t) for t in two_epochs(config)])
    assert same(dirty["weights"], clean["weights"])
    assert dirty["metrics"] == clean["metrics"]


def scored(config: Config, scores: list[float]) -> list[Trajectory]:
    """One rollout of groups of 2 whose members have these scores."""
    behaviour = small_policy(values_per_chunk(config), seed=1)
    trajectory = rollout(behaviour, num_envs=len(scores), groups_per_epoch=GROUPS)
    rewards = torch.zeros_like(trajectory.rewards)
    rewards[0, :, 0] = torch.tensor(scores)
    return [replace(trajectory, rewards=rewards, scores=torch.tensor(scores, dtype=torch.float32))]


FILTERED = "algorithm.filter_rewards=true", "algorithm.rewards_lower_bound=0.1", "algorithm.rewards_upper_bound=0.9"


def test_a_rank_whose_groups_are_all_filtered_changes_nothing(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    config = training_config("grpo", *FILTERED, "actor.micro_batch_size=3")
    trajectories = scored(config, [0, 1, 1, 1, 1, 0, 0, 0])  # rank 1 has groups 1 and 3
    one = trained_on(mesh, config, trajectories)
    first, second = two_ranks.run(trained_on, config, trajectories)
    assert second["samples"] == 0
    assert first["metrics"]["samples"] == one["metrics"]["samples"] == first["samples"]
    assert distance(first["weights"], one["weights"]) < 1e-6
    assert distance(one["weights"], untrained(mesh, config)) > SMALLEST_MOVE
    assert second["metrics"] == first["metrics"]


def test_if_all_groups_are_filtered_the_update_is_skipped(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    config = training_config("grpo", *FILTERED)
    trajectories = scored(config, [1, 1, 0, 0])
    one = trained_on(mesh, config, trajectories)
    assert one["metrics"]["optimizer_steps"] == one["metrics"]["samples"] == 0
    assert same(one["weights"], untrained(mesh, config))
    for result in two_ranks.run(trained_on, config, trajectories):
        assert result["metrics"] == one["metrics"]


@pytest.mark.parametrize("limit", [0.05, None])
def test_clip_grad_limits_the_norm(mesh: DeviceMesh, limit: float | None) -> None:
    """With SGD at learning rate 1 the weights move by the gradient."""
    config = training_config(
        "ppo",
        "algorithm.update_epoch=1",
        "algorithm.n_minibatches=1",
        "actor.optim.lr=1.0",
        f"actor.optim.clip_grad={'null' if limit is None else limit}",
    )
    learner = Learner(mesh, config, make_optimizer=sgd)
    before = learner.weights()
    metrics = learner.train()
    after = learner.weights()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm().item()
    assert metrics["grad_norm"] > 0.05, "the norm before clipping"
    assert moved == pytest.approx(metrics["grad_norm"] if limit is None else limit, rel=1e-4)


@pytest.mark.parametrize("field", ["returns", "advantages"])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(mesh: DeviceMesh, field: str) -> None:
    learner = Learner(mesh, training_config("ppo", "algorithm.n_minibatches=1"))
    learner.train()
    batch = learner.batch(two_epochs(learner.config))
    before = learner.weights()
    moments = {name: value.clone() for name, value in _moments(learner).items()}
    values = getattr(batch, field).clone()
    values[5] = torch.nan
    where = sample_name(int(batch.sample_ids[5]))
    message = rf"training step 2: the gradient's norm is nan, .* those before it\. {field} of {where}\. Lower"
    with pytest.raises(FloatingPointError, match=message):
        learner.updater.run(replace(batch, **{field: values}), step=1)
    assert same(learner.weights(), before)
    assert same(_moments(learner), moments)


def test_a_loss_that_is_not_finite_names_its_micro_batch(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("grpo", "actor.micro_batch_size=2"))
    batch = learner.batch(two_epochs(learner.config))
    with torch.no_grad():
        dict(learner.policy.named_parameters())["log_std"].fill_(-200)  # a standard deviation of 0
    with pytest.raises(FloatingPointError, match=r"the loss is \S+ in a micro-batch of env \d+, chunk \d+"):
        learner.updater.run(batch, step=0)


def test_weights_that_are_not_finite_are_named(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("ppo"))
    batch = learner.batch(two_epochs(learner.config))
    with torch.no_grad():
        next(learner.policy.parameters()).fill_(torch.inf)
    with pytest.raises(FloatingPointError, match=r"the weights themselves are not finite \("):
        learner.updater.run(batch, step=0)


def _moments(learner: Learner) -> dict[str, Tensor]:
    states = enumerate(learner.optimizer.state.values())
    return {
        f"{i}.{name}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for i, state in states
        for name, value in state.items()
    }


def poisoned(mesh: DeviceMesh, config: Config, group: int) -> dict[str, Any]:
    """A training step on rollouts in which a group's rewards are NaN, and one without them."""
    [trajectory] = scored(config, [0, 1, 0, 1])
    rewards = trajectory.rewards.clone()
    rewards[0, 2 * group : 2 * group + 2, 0] = torch.nan
    learner = Learner(mesh, config)
    good, bad = (learner.batch([t]) for t in (trajectory, replace(trajectory, rewards=rewards)))
    learner.update(good, step=0)
    before, moments = learner.weights(), _moments(learner)
    metrics = learner.update(bad, step=1)
    return {
        "skipped": same(learner.weights(), before) and same(_moments(learner), moments),
        "metrics": metrics,
        "after": learner.update(good, step=2),
        "moved": not same(learner.weights(), before),
    }


SKIP = "actor.optim.skip_nonfinite=true", "algorithm.n_minibatches=1", "algorithm.update_epoch=2"


def test_steps_that_are_not_finite_can_be_skipped(mesh: DeviceMesh) -> None:
    result = poisoned(mesh, training_config("grpo", *SKIP), group=1)
    assert result["skipped"]
    assert result["metrics"]["nonfinite_steps"] == 2
    assert result["metrics"]["optimizer_steps"] == result["metrics"]["grad_norm"] == 0
    assert result["after"]["nonfinite_steps"] == 0
    assert result["after"]["optimizer_steps"] == 2
    assert result["moved"]


def test_all_ranks_skip_alike(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(poisoned, training_config("grpo", *SKIP), 1)  # rank 1 has group 1
    assert first["metrics"]["nonfinite_steps"] == second["metrics"]["nonfinite_steps"] == 2
    assert second["skipped"]
    assert first["after"] == second["after"]
    assert first["after"]["optimizer_steps"] == 2


def test_nothing_is_said_of_skipped_steps_where_they_stop_the_run(mesh: DeviceMesh) -> None:
    assert "nonfinite_steps" not in trained(mesh, training_config("grpo"), 1)["metrics"]


def test_nan_in_one_rank_stops_all(two_ranks: Ranks) -> None:
    config = training_config("grpo")
    [trajectory] = scored(config, [0, 1, 0, 1])
    rewards = trajectory.rewards.clone()
    rewards[0, 3, 0] = torch.nan  # group 1, so rank 1
    with pytest.raises(RuntimeError, match="FloatingPointError: training step 1: the gradient's norm is nan"):
        two_ranks.run(trained_on, config, [replace(trajectory, rewards=rewards)])


def test_the_entropy_bonus_widens_the_distribution(mesh: DeviceMesh) -> None:
    log_std = {}
    for bonus in (0.0, 1.0):
        config = training_config("grpo", f"algorithm.entropy_bonus={bonus}")
        log_std[bonus] = trained(mesh, config, 1)["weights"]["log_std"].mean()
    assert log_std[1.0] > log_std[0.0] + 0.005


def test_an_extreme_ratio_ends_the_update(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    recipe = "aipo", "actor.optim.lr=0.02", "algorithm.n_minibatches=1"
    free = encouraged(mesh, training_config(*recipe, "algorithm.update_epoch=20"))
    assert free["metrics"]["optimizer_steps"] == 20
    config = training_config(*recipe, "algorithm.update_epoch=20", "algorithm.early_stop_imp_ratio=1.3")
    stopped = encouraged(mesh, config)
    assert stopped["metrics"]["early_stopped"] == 1
    steps = int(stopped["metrics"]["optimizer_steps"])
    assert 2 <= steps < 20
    first, second = two_ranks.run(encouraged, config)
    assert first["metrics"]["optimizer_steps"] == second["metrics"]["optimizer_steps"] == steps
    assert distance(first["weights"], stopped["weights"]) < 1e-5
    # The mini-batch that stopped it was not trained on.
    until_then = encouraged(mesh, training_config(*recipe, f"algorithm.update_epoch={steps}"))
    assert same(until_then["weights"], stopped["weights"])


def test_a_fresh_critic_is_trained_alone(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = training_config("ppo", "algorithm.critic_warmup_steps=2", "actor.optim.weight_decay=0.1")
    learner = Learner(mesh, config)
    before = learner.weights()
    for step in range(2):
        learner.train(first=step)
        now = learner.weights()
        changed = {name for name in before if not torch.equal(before[name], now[name])}
        assert changed == {name for name in before if name.startswith("value_head.")}
    # Saved in between, it goes on as if it had not been.
    save_actor(learner.policy, learner.optimizer, tmp_path)
    other = Learner(mesh, config)
    load_actor(other.policy, other.optimizer, tmp_path)
    for each in (learner, other):
        each.train(first=2)
    after = learner.weights()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert same(other.weights(), after)


def test_a_warm_up_trains_nothing_where_the_value_head_is_frozen(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("ppo", "algorithm.critic_warmup_steps=1"))
    for parameter in learner.policy.value_parameters():
        parameter.requires_grad_(False)
    before = learner.weights()
    learner.train(first=0)
    assert same(learner.weights(), before)


@pytest.mark.parametrize("key", ["actor.micro_batch_size=2", "actor.gradient_checkpointing=true"])
def test_a_critic_alone_costs_no_gradient_of_the_policy(mesh: DeviceMesh, key: str) -> None:
    learner = Learner(mesh, training_config("ppo", "algorithm.critic_warmup_steps=1", key))
    computed: list[str] = []
    for name, parameter in learner.policy.named_parameters():
        parameter.register_hook(lambda _, name=name: computed.append(name))
    learner.updater.cost = SampleCost(forward=(1.0,), training=(3.0,), again=(0.0,))
    samples = learner.train(first=0)["samples"] * learner.config.algorithm.update_epoch
    assert learner.updater.flops.model == samples
    assert computed
    assert all(name.startswith("value_head.") for name in computed), computed
    assert not learner.updater.without_gradient  # or the run says that nothing reads what was not asked for
    learner.train(first=1)
    assert learner.updater.flops.model == 3 * samples
    assert "policy.0.weight" in computed


def test_a_model_that_asks_for_a_warm_up_learns_by_grpo_at_once(mesh: DeviceMesh) -> None:
    config = training_config("grpo")
    learner = Learner(mesh, replace(config, algorithm=replace(config.algorithm, critic_warmup_steps=1)))
    before = learner.weights()
    learner.train(first=0)
    assert not same(learner.weights(), before)


def test_a_longer_warm_up_changes_no_later_step_of_the_policy(mesh: DeviceMesh) -> None:
    """Its optimiser state is that of a fresh optimiser."""
    warm = Learner(mesh, training_config("ppo", "algorithm.critic_warmup_steps=1", "actor.optim.clip_grad=null"))
    warm.train(first=0)
    cold = Learner(mesh, training_config("ppo", "actor.optim.clip_grad=null"))
    for learner in (warm, cold):
        learner.train(first=1)
    assert torch.equal(warm.weights()["policy.0.weight"], cold.weights()["policy.0.weight"])


def test_imitation_of_what_scored_raises_its_probability(mesh: DeviceMesh) -> None:
    def nll(coefficient: str) -> float:
        config = training_config("grpo", f"algorithm.positive_nll_coef={coefficient}")
        learner = Learner(mesh, config)
        for step in range(4):
            learner.train(first=step)
        batch = learner.batch(two_epochs(config))
        good = batch.select((batch.scores > 0).nonzero().squeeze(-1))
        with torch.no_grad():
            logprobs = learner.policy(good.replay_inputs, temperature=1.0).logprobs
        return -logprobs[good.loss_mask].mean().item()

    assert nll("1.0") < nll("null") - 0.01


@pytest.mark.parametrize(("epochs", "count"), [(1, 1), (3, 2), (2, 5)])
def test_optimizer_steps_are_epochs_times_minibatches(mesh: DeviceMesh, epochs: int, count: int) -> None:
    config = training_config("grpo", f"algorithm.update_epoch={epochs}", f"algorithm.n_minibatches={count}")
    learner = Learner(mesh, config)
    metrics = learner.train()
    total = epochs * count
    assert metrics["optimizer_steps"] == total
    steps = [what for what, _, _ in learner.progress if what.startswith("update ")]
    assert list(dict.fromkeys(steps)) == [f"update {done}/{total}: micro-batch" for done in range(1, total + 1)]
    assert all(state["step"] == total for state in learner.optimizer.state.values())


@pytest.mark.parametrize("precision", [[], ["actor.fsdp_config.mixed_precision.reduce_dtype=float16"]])
def test_every_micro_batch_of_an_optimizer_step_is_a_sign_of_life(mesh: DeviceMesh, precision: list[str]) -> None:
    one_step = "algorithm.update_epoch=1", "algorithm.n_minibatches=1", "actor.micro_batch_size=1"
    learner = Learner(mesh, training_config("decoupled_ppo", *one_step, *precision))
    batch = learner.batch(two_epochs(learner.config))
    passes = len(batch.trainable())
    assert passes > 30
    assert learner.progress == [("scoring", done + 1, passes) for done in range(passes)]
    learner.progress.clear()
    learner.update(batch, step=0)
    assert learner.progress == [("update 1/1: micro-batch", done + 1, passes) for done in range(passes)]


def test_global_batch_size_derives_the_number_of_minibatches(mesh: DeviceMesh) -> None:
    def steps(size: int) -> float:
        config = training_config("grpo", "algorithm.n_minibatches=null", f"actor.global_batch_size={size}")
        return Learner(mesh, config).train()["optimizer_steps"] / config.algorithm.update_epoch

    samples = len(Learner(mesh, training_config("grpo")).batch(two_epochs(training_config("grpo"))))
    assert steps(samples) == 1
    assert steps(10 * samples) == 1
    assert steps(samples // 4) == round(samples / (samples // 4))
    assert steps(1) == samples


def test_more_minibatches_than_samples_give_one_each(mesh: DeviceMesh) -> None:
    config = training_config("grpo", "algorithm.update_epoch=1", "algorithm.n_minibatches=1000")
    metrics = Learner(mesh, config).train()
    assert metrics["optimizer_steps"] == metrics["samples"]


def test_resharding_after_forward_changes_nothing(mesh: DeviceMesh) -> None:
    runs = [
        trained(mesh, training_config("ppo", f"actor.fsdp_config.reshard_after_forward={on}"), 1)
        for on in ("true", "false")
    ]
    assert same(runs[0]["weights"], runs[1]["weights"])


def with_every_other_unit(mesh: DeviceMesh, config: Config) -> dict[str, Any]:
    """Half of the samples have no advantage."""
    learner = Learner(mesh, config)
    batch = learner.batch(two_epochs(config))
    advantages = batch.advantages.clone()
    advantages[batch.sample_ids % 2 == 0] = 0.0
    passes: list[int] = []
    learner.policy.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0]["state"])))
    metrics = learner.update(replace(batch, advantages=advantages), step=0)
    return {"weights": learner.weights(), "metrics": metrics, "passed": sum(passes)}


@pytest.mark.parametrize("recipe", [("grpo",), ("gspo",), ("aipo", "algorithm.positive_nll_coef=0.3")])
def test_samples_without_advantage_are_skipped_and_nothing_changes(
    mesh: DeviceMesh, two_ranks: Ranks, recipe: tuple[str, ...]
) -> None:
    skipping, going = (
        training_config(*recipe, "actor.micro_batch_size=3", f"actor.skip_zero_advantages={skip}")
        for skip in ("true", "false")
    )
    one, all_of_them = with_every_other_unit(mesh, skipping), with_every_other_unit(mesh, going)
    assert distance(one["weights"], all_of_them["weights"]) < 1e-7
    assert 0.2 < one["metrics"]["samples_skipped"] < 0.8
    assert one["passed"] < 0.8 * all_of_them["passed"]
    assert "samples_skipped" not in all_of_them["metrics"]
    first, second = two_ranks.run(with_every_other_unit, skipping)
    assert distance(first["weights"], one["weights"]) < 1e-6
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["samples_skipped"] == one["metrics"]["samples_skipped"]


def test_an_early_stop_asks_for_the_ratio_of_all_samples(mesh: DeviceMesh) -> None:
    stop = ("algorithm.n_minibatches=1", "algorithm.early_stop_imp_ratio=1.002")  # it is 1.0033, and another of half
    config = training_config("grpo", *stop)
    assert config.actor.skip_zero_advantages
    none_skipped = replace(config, actor=replace(config.actor, skip_zero_advantages=False))
    one, other = (with_every_other_unit(mesh, each) for each in (config, none_skipped))
    assert one["metrics"]["early_stopped"] == 1
    assert one["metrics"] == other["metrics"]
    assert same(one["weights"], other["weights"])


@pytest.mark.parametrize(
    "recipe", [("ppo",), ("grpo", "algorithm.entropy_bonus=0.01"), ("grpo", "algorithm.kl_beta=0.1")]
)
def test_samples_with_another_loss_are_not_skipped(mesh: DeviceMesh, recipe: tuple[str, ...]) -> None:
    assert with_every_other_unit(mesh, training_config(*recipe))["metrics"]["samples_skipped"] == 0


def test_without_any_advantage_nothing_moves(mesh: DeviceMesh) -> None:
    learner = Learner(mesh, training_config("grpo"))
    before = learner.weights()
    batch = learner.batch(two_epochs(learner.config))
    metrics = learner.update(replace(batch, advantages=torch.zeros_like(batch.advantages)), step=0)
    assert metrics["samples_skipped"] == 1
    assert metrics["grad_norm"] == 0
    assert same(learner.weights(), before)
