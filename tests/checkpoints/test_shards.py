from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embodied_rl.checkpoints.shards import (
    ACTOR_DIR,
    ShardWriter,
    actor_state,
    load_actor,
    load_weights,
    save_actor,
)
from embodied_rl.errors import CheckpointError
from embodied_rl.training.optimizer import build_optimizer, init_optimizer_state
from tests.training.learner import Learner, distance, load_and_go_on, same, save_and_go_on, training_config
from tests.training.ranks import Ranks
from tests.training.rollouts import small_policy


def moments(learner: Learner) -> dict[str, Tensor]:
    names = {id(p): name for name, p in learner.policy.named_parameters()}
    return {
        f"{names[id(p)]}.{key}": value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for p, state in learner.optimizer.state.items()
        for key, value in state.items()
    }


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_loading_gives_what_was_saved_bit_for_bit(mesh: DeviceMesh, tmp_path: Path, algorithm: str) -> None:
    config = training_config(algorithm, "actor.optim.weight_decay=0.01")
    saved = Learner(mesh, config)
    saved.train()
    save_actor(saved.policy, saved.optimizer, tmp_path)
    weights, state = saved.weights(), moments(saved)
    assert len(state) == 3 * len(weights), "step, first and second moment of each"

    loaded = Learner(mesh, config)
    assert not same(loaded.weights(), weights)
    load_actor(loaded.policy, loaded.optimizer, tmp_path)
    assert same(loaded.weights(), weights)
    assert same(moments(loaded), state)

    metrics = [learner.train(first=1) for learner in (saved, loaded)]
    assert metrics[0] == metrics[1]
    assert same(saved.weights(), loaded.weights())
    assert not same(saved.weights(), weights)


def test_saving_does_not_disturb_training(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Not even before the first optimiser step, where torch would count one."""
    config = training_config("ppo")
    plain, saving, loading = (Learner(mesh, config) for _ in range(3))
    save_actor(saving.policy, saving.optimizer, tmp_path / "0")
    load_actor(loading.policy, loading.optimizer, tmp_path / "0")
    for step in range(2):
        for learner in (plain, saving, loading):
            learner.train(first=step)
        save_actor(saving.policy, saving.optimizer, tmp_path / str(step + 1))
    assert same(plain.weights(), saving.weights())
    assert same(plain.weights(), loading.weights())


def initialised(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """Moments of a learner that never trained a bias: before, with those made, and after one more step of it all."""
    learner = Learner(mesh, training_config("ppo", "actor.optim.weight_decay=0.01"))
    biases = {name: p for name, p in learner.policy.named_parameters() if name.endswith("bias")}
    weights = {name: p for name, p in learner.policy.named_parameters() if name not in biases}
    for p in weights.values():
        p.grad = torch.full_like(p, 0.5)
    learner.optimizer.step()
    before, held = moments(learner), learner.weights()
    next(iter(biases.values())).grad = torch.ones_like(next(iter(biases.values())))
    gradients = {name: p.grad for name, p in learner.policy.named_parameters()}
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    init_optimizer_state(learner.optimizer)
    assert same(learner.weights(), held)
    assert [group["lr"] for group in learner.optimizer.param_groups] == rates
    assert all(p.grad is gradients[name] for name, p in learner.policy.named_parameters())
    return {"before": before, "after": moments(learner)}


def check_initialised(outcome: dict[str, dict[str, Tensor]]) -> None:
    before, after = outcome["before"], outcome["after"]
    made = after.keys() - before.keys()
    assert made
    assert all(".bias." in name for name in made)
    assert not any(".bias." in name for name in before)
    assert {name.rpartition(".")[2] for name in made} == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(after[name].any() for name in made)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(before[name].any() for name in before)


def test_state_is_made_where_it_is_missing_and_nowhere_else(mesh: DeviceMesh, two_ranks: Ranks) -> None:
    check_initialised(initialised(mesh))
    for outcome in two_ranks.run(initialised):
        check_initialised(outcome)


def test_a_parameter_that_never_had_a_gradient_is_saved(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = training_config("ppo")
    saved, loaded = Learner(mesh, config), Learner(mesh, config)
    for p in saved.policy.value_parameters():
        p.grad = torch.ones_like(p)
    saved.optimizer.step()
    save_actor(saved.policy, saved.optimizer, tmp_path)
    load_actor(loaded.policy, loaded.optimizer, tmp_path)
    assert same(moments(loaded), moments(saved))
    assert len(moments(loaded)) == 3 * len(loaded.weights())


def test_a_checkpoint_of_a_run_that_trained_less_is_named(mesh: DeviceMesh, tmp_path: Path) -> None:
    saved, loaded = (Learner(mesh, training_config("ppo")) for _ in range(2))
    frozen = "policy.0.bias"
    saved.policy.get_parameter(frozen).requires_grad_(False)
    optimizer = build_optimizer(saved.policy, saved.config.actor.optim)
    save_actor(saved.policy, optimizer, tmp_path)
    with pytest.raises(CheckpointError, match=rf"lacks 3 of the \d+ tensors .*\n  optimizer.state.{frozen}.exp_avg\n"):
        load_actor(loaded.policy, loaded.optimizer, tmp_path)
    load_actor(loaded.policy, None, tmp_path)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_saved_by_two_ranks_loaded_by_one_and_the_reverse(
    mesh: DeviceMesh, two_ranks: Ranks, tmp_path: Path, algorithm: str
) -> None:
    config = training_config(algorithm)
    one = save_and_go_on(mesh, config, tmp_path / "one")
    two = two_ranks.run(save_and_go_on, config, tmp_path / "two")[0]

    one_from_two = load_and_go_on(mesh, config, tmp_path / "two")
    assert same(one_from_two["loaded"], two["saved"])
    assert distance(one_from_two["after"], two["after"]) < 1e-6

    two_from_one = two_ranks.run(load_and_go_on, config, tmp_path / "one")[0]
    assert same(two_from_one["loaded"], one["saved"])
    assert distance(two_from_one["after"], one["after"]) < 1e-6
    assert distance(one["after"], one["saved"]) > 1e-3


def test_weights_alone(mesh: DeviceMesh, tmp_path: Path) -> None:
    saved, loaded = (Learner(mesh, training_config("grpo")) for _ in range(2))
    saved.train()
    save_actor(saved.policy, saved.optimizer, tmp_path)
    load_actor(loaded.policy, None, tmp_path)
    assert same(loaded.weights(), saved.weights())
    assert not loaded.optimizer.state


def test_hyperparameters_are_those_of_the_run_that_loads(mesh: DeviceMesh, tmp_path: Path) -> None:
    saved = Learner(mesh, training_config("ppo"))
    saved.train()
    save_actor(saved.policy, saved.optimizer, tmp_path)
    options = ("actor.optim.lr=0.5", "actor.optim.value_lr=0.25", "actor.optim.adam_beta1=0.8")
    loaded = Learner(mesh, training_config("ppo", *options, "actor.optim.weight_decay=0.1"))
    load_actor(loaded.policy, loaded.optimizer, tmp_path)
    assert same(moments(loaded), moments(saved))
    groups = loaded.optimizer.param_groups
    assert {group["lr"] for group in groups} == {0.5, 0.25}
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    assert {group["betas"] for group in groups} == {(0.8, 0.999)}


def save(policy: Any, directory: Path) -> None:
    save_actor(policy, build_optimizer(policy, training_config("grpo").actor.optim), directory)


@pytest.mark.usefixtures("mesh")
def test_another_model_is_refused_with_the_tensors_that_differ(tmp_path: Path) -> None:
    save(small_policy(1), tmp_path)
    other = small_policy(0, hidden_size=8)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_actor(other, None, tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path} holds another model than this run's:\n")
    assert "  policy.0.weight is [16, 4], expected [8, 4]\n" in text
    assert "  and 3 more\n" in text
    assert "config.yaml in its run directory" in text
    assert same(dict(other.state_dict()), before)

    with pytest.raises(CheckpointError, match=r"value_head\.0\.bias is unexpected"):
        load_actor(small_policy(0), None, tmp_path)
    save(small_policy(0), tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"value_head\.4\.weight is missing"):
        load_actor(small_policy(1), None, tmp_path / "without")


@pytest.mark.usefixtures("mesh")
def test_a_value_head_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    other: Any = small_policy(1, seed=3)
    del other.value_head[4]
    save(other, tmp_path / "part")
    with pytest.raises(CheckpointError, match=r"value_head\.4\.bias is missing"):
        load_weights(small_policy(1), tmp_path / "part")
    save(small_policy(0, seed=3), tmp_path / "none")
    policy = small_policy(1)
    own = policy.get_parameter("value_head.4.bias").clone()
    load_weights(policy, tmp_path / "none")
    assert torch.equal(policy.get_parameter("value_head.4.bias"), own)
    assert torch.equal(policy.get_parameter("policy.0.weight"), other.get_parameter("policy.0.weight"))
    load_weights(small_policy(0), tmp_path / "part")


@pytest.mark.usefixtures("mesh")
def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = small_policy()
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/actor: not a readable checkpoint")):
        load_actor(policy, None, tmp_path)

    save(small_policy(seed=3), tmp_path)
    [shard] = (tmp_path / ACTOR_DIR).glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: cannot be read, or not whole"):
        load_actor(policy, None, tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load_actor(policy, None, tmp_path)


def test_moments_that_were_not_saved_are_named_and_no_damage(mesh: DeviceMesh, tmp_path: Path) -> None:
    """As when a parameter had no state at the save."""
    learner = Learner(mesh, training_config("grpo"))
    learner.train()
    state = actor_state(learner.policy, learner.optimizer)
    lost = ["policy.0.bias", "policy.2.weight"]
    for name in lost:
        del state["optimizer"]["state"][name]
    write(state, storage_writer=ShardWriter(tmp_path / ACTOR_DIR))
    before = learner.weights()
    with pytest.raises(CheckpointError) as caught:
        load_actor(learner.policy, learner.optimizer, tmp_path)
    text = str(caught.value)
    assert re.search(r"can be read, and lacks 6 of the \d+ tensors of this run's optimiser:\n", text)
    for name in lost:
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            assert f"  optimizer.state.{name}.{moment}\n" in text
    assert "They were not saved." in text
    assert "runner.init_from" in text
    assert "damaged" not in text
    assert "not whole" not in text
    assert same(learner.weights(), before)
    load_actor(learner.policy, None, tmp_path)


def load_damaged(mesh: DeviceMesh, directory: Path) -> str:
    learner = Learner(mesh, training_config("grpo"))
    try:
        load_actor(learner.policy, learner.optimizer, directory)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_ranks_agree_that_a_checkpoint_is_damaged(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_and_go_on, training_config("grpo"), tmp_path)
    first, second = sorted((tmp_path / ACTOR_DIR).glob("*.safetensors"))
    content = first.read_bytes()
    first.unlink()
    for message in two_ranks.run(load_damaged, tmp_path):
        assert re.search(r"not whole: parts of .* are in none of its 1 file", message)
        assert len(message.splitlines()) == 1
    first.write_bytes(content)
    second.unlink()
    for message in two_ranks.run(load_damaged, tmp_path):
        assert re.search(r"is \[\d.*\], expected \[\d.*\]", message), "what is left looks like a smaller model"


def test_a_saved_model_survives_its_own_directory_moving(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Publishing renames the directory."""
    saved, loaded = (Learner(mesh, training_config("grpo")) for _ in range(2))
    saved.train()
    save_actor(saved.policy, saved.optimizer, tmp_path / "scratch")
    (tmp_path / "scratch").rename(tmp_path / "final")
    load_actor(loaded.policy, loaded.optimizer, tmp_path / "final")
    assert same(loaded.weights(), saved.weights())
    assert torch.isfinite(torch.cat([tensor.flatten() for tensor in loaded.weights().values()])).all()
