"""Weights that wait in host memory. What a CPU can show: the device's copy is another one, and nothing gets lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from embodied_rl.errors import UserError
from embodied_rl.models.weights.host import HostWeights, require_accelerator
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.training.sharding import TrainingState
from tests.configs import config_of
from tests.stand_in import DEVICE, stand_in_accelerator
from tests.training.learner import Learner, same, training_config, two_epochs
from tests.training.rollouts import small_policy


def test_new_weights_go_to_the_host_and_are_used_after_the_next_load() -> None:
    policy = small_policy(0)
    host = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    weights = HostWeights(policy, "cpu")
    weights.load()
    used = policy.state_dict()
    assert all(torch.equal(used[name], host[name]) for name in host)
    assert all(used[name].data_ptr() != host[name].data_ptr() for name in host)
    weights.drop()
    assert all(policy.state_dict()[name].data_ptr() == host[name].data_ptr() for name in host)
    for tensor in host.values():
        tensor.fill_(0.5)
    weights.load()
    assert all((tensor == 0.5).all() for tensor in policy.state_dict().values())


def test_training_goes_on_after_a_move(mesh: DeviceMesh) -> None:
    config = training_config("ppo")
    plain, moved = Learner(mesh, config), Learner(mesh, config)
    state, timer = TrainingState([moved.policy], moved.optimizer, "cpu"), PhaseTimer()
    batch = plain.batch(two_epochs(config))
    for step in range(3):
        plain.update(batch, step=step)
        with state.on_device(timer):
            moved.update(batch, step=step)
    assert same(moved.weights(), plain.weights())
    assert {"load", "offload"} <= timer.drain().keys()


@pytest.mark.parametrize(
    "parts", [["weights"], ["gradients"], ["optimizer"], ["optimizer", "gradients"], ["weights", "optimizer"]], ids=str
)
def test_parts_leave_the_device_apart(mesh: DeviceMesh, parts: list[str]) -> None:
    config = training_config("ppo")
    with stand_in_accelerator():
        plain, moved = (Learner(mesh, config, device=DEVICE) for _ in range(2))
        state = TrainingState([moved.policy], moved.optimizer, DEVICE, parts)
        batch = plain.batch(two_epochs(config))
        for step in range(2):
            plain.update(batch, step=step)
            with state.on_device(PhaseTimer()):
                moved.update(batch, step=step)
            trained = [p for group in moved.optimizer.param_groups for p in group["params"]]
            moments = [moved.optimizer.state[p]["exp_avg"] for p in trained]
            assert {p.device.type for p in trained} == {"cpu" if "weights" in parts else DEVICE}
            assert {tensor.device.type for tensor in moments} == {"cpu" if "optimizer" in parts else DEVICE}
            dropped = parts != ["optimizer"]
            assert all((p.grad is None) == dropped for p in trained)
        found, expected = ([p.detach().cpu() for p in each.policy.parameters()] for each in (moved, plain))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("parts", "dtype"), [(["weights"], "float32"), (["weights"], "int8"), (["optimizer"], "bfloat16")], ids=str
)
def test_parts_that_left_are_resumed(mesh: DeviceMesh, parts: list[str], dtype: str) -> None:
    config = training_config("ppo", f"actor.optim.state_dtype={dtype}")
    with stand_in_accelerator():
        plain, moved = (Learner(mesh, config, device=DEVICE) for _ in range(2))
        batch = plain.batch(two_epochs(config))
        plain.update(batch, step=0)
        state = TrainingState([moved.policy], moved.optimizer, DEVICE, parts)
        state.leave_device()
        moved.policy.load_state_dict(plain.policy.state_dict())
        moved.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        state.leave_device()
        assert {moments["exp_avg"].device.type for moments in moved.optimizer.state.values()} == {"cpu"}
        plain.update(batch, step=1)
        with state.on_device(PhaseTimer()):
            moved.update(batch, step=1)
        found, expected = ([p.detach().cpu() for p in each.policy.parameters()] for each in (moved, plain))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_parts_are_named_with_the_offload_alone(section: str) -> None:
    recipe = ("env=dummy", "algorithm=ppo", "critic.enable=true")
    with pytest.raises(UserError, match=rf"{section}\.offload: this run would not read it, since .*enable_offload is"):
        config_of(*recipe, f"{section}.offload=[weights]")
    assert config_of(*recipe, f"{section}.enable_offload=true", f"{section}.offload=[optimizer]")
    with pytest.raises(UserError, match=rf"{section}\.offload: got \[\]"):
        config_of(*recipe, f"{section}.enable_offload=true", f"{section}.offload=[]")
    with pytest.raises(UserError, match=rf"{section}\.offload.*should be .*gradients"):
        config_of(*recipe, f"{section}.enable_offload=true", f"{section}.offload=[optimiser]")


def test_there_must_be_something_to_offload_from() -> None:
    require_accelerator("actor.enable_offload", "cuda:0")
    with pytest.raises(UserError, match=r"actor\.enable_offload=true: this worker has no accelerator.*set it to false"):
        require_accelerator("actor.enable_offload", "cpu")
