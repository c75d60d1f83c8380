"""Adam's moments in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.schema import Config
from embodied_rl.training.compact_adam import CompactAdamW, _rounded
from embodied_rl.training.sharding import TrainingState
from tests.training.learner import Learner, distance, load_and_go_on, same, save_and_go_on, trained, training_config
from tests.training.ranks import Ranks

COMPACT = "actor.optim.state_dtype=bfloat16"
BETAS = (0.9, 0.999)
NEAR = 0.05
"""Of the way that training goes: how far small moments may lead from it."""
BFLOAT16_STEP = 2.0**-7
"""The most that neighbours in bfloat16 are apart, relative to them."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def compact(*parameters: Tensor, lr: float = 0.01, weight_decay: float = 0.0) -> CompactAdamW:
    group = {"params": list(parameters), "lr": lr, "weight_decay": weight_decay}
    return CompactAdamW([group], lr=lr, betas=BETAS, eps=1e-8)


def test_values_are_rounded_to_a_neighbour_with_their_own_mean() -> None:
    values = torch.tensor([1.0 + 2.0**-9, -(1.0 + 3 * 2.0**-9), 0.0, 1.5, -float("inf"), 1e-30])
    drawn = _rounded(values.repeat(40000, 1), torch.Generator().manual_seed(0))
    assert torch.equal(drawn.bfloat16().float(), drawn)
    neighbours = [sorted(set(column.tolist())) for column in drawn.T]
    assert neighbours[:5] == [[1.0, 1 + 2.0**-7], [-1 - 2.0**-7, -1.0], [0.0], [1.5], [-float("inf")]]
    # A quarter of the way up, three quarters down: standard deviation of the mean is 2^-7 sqrt(3/16/40000) = 1.7e-5.
    assert drawn.mean(0)[:2].tolist() == pytest.approx(values[:2].tolist(), abs=7e-5)
    assert drawn.mean(0)[5].item() == pytest.approx(1e-30, rel=1e-3)


def test_a_first_step_is_adamws() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(50, 7), torch.randn(50, 7)
    own, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [other], "lr": 0.01, "weight_decay": 0.1}
    optimizers: list[Optimizer] = [compact(own, weight_decay=0.1), AdamW([group], betas=BETAS, eps=1e-8)]
    own.grad, other.grad = gradient.clone(), gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.allclose(own, other, rtol=0, atol=1e-7)
    assert torch.equal(own.grad, gradient)
    mine, torchs = (optimizer.state[p] for optimizer, p in zip(optimizers, (own, other), strict=True))
    assert mine.keys() == torchs.keys()
    for name in ("exp_avg", "exp_avg_sq"):
        assert mine[name].dtype == torch.bfloat16
        assert ((mine[name].float() - torchs[name]).abs() <= BFLOAT16_STEP * torchs[name].abs()).all()


def test_small_changes_are_not_lost() -> None:
    """Without gradient the second moment falls by a factor of 0.999 a step, less than a step of bfloat16."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = compact(parameter)
    parameter.grad = torch.zeros(4096)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    for _ in range(500):
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**500, rel=0.01)
    assert (torch.ones(1).bfloat16().float() * 0.999).bfloat16().item() == 1.0  # rounded to the nearest it stays


def held(optimizer: Optimizer) -> int:
    """Bytes of this rank's moments."""
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    return sum(t.nbytes for t in (m.to_local() if isinstance(m, DTensor) else m for m in moments))


def bytes_of_state(mesh: DeviceMesh, *options: str) -> tuple[int, int]:
    """Bytes of a rank's moments after a step, and numbers in its parameters."""
    learner = Learner(mesh, training_config("ppo", *options))
    learner.train()
    own = [p.to_local() if isinstance(p, DTensor) else p for p in learner.policy.parameters() if p.requires_grad]
    return held(learner.optimizer), sum(p.numel() for p in own)


@pytest.mark.parametrize("options", [(), ("model.lora.rank=2",)], ids=["all", "lora"])
def test_the_state_has_half_the_bytes(mesh: DeviceMesh, ranks: Ranks, options: tuple[str, ...]) -> None:
    for size, numbers in [bytes_of_state(mesh, COMPACT, *options), *ranks.run(bytes_of_state, COMPACT, *options)]:
        assert size == 2 * 2 * numbers > 0
    size, numbers = bytes_of_state(mesh, *options)
    assert size == 2 * 4 * numbers


def fitted(make: type[CompactAdamW] | type[AdamW]) -> list[float]:
    """Losses of a small network that learns a function of one number."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = make([{"params": list(network.parameters())}], lr=0.01, betas=BETAS, eps=1e-8)
    inputs = torch.linspace(-3, 3, 64)[:, None]
    losses = []
    for _ in range(600):
        loss = (network(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_learns_as_adamw_does() -> None:
    own, torchs = fitted(CompactAdamW), fitted(AdamW)
    assert own[-1] < own[0] / 500 and torchs[-1] < torchs[0] / 500
    assert sum(own) == pytest.approx(sum(torchs), rel=0.05)


@pytest.mark.parametrize("options", [(), ("model.lora.rank=2",), ("actor.optim.clip_grad=0.05",)], ids=str)
def test_a_policy_trains_almost_alike(mesh: DeviceMesh, options: tuple[str, ...]) -> None:
    start, plain = (trained(mesh, training_config("ppo", *options), steps)["weights"] for steps in (0, 3))
    small = trained(mesh, training_config("ppo", COMPACT, *options), 3)["weights"]
    assert 0 < distance(small, plain) < NEAR * distance(plain, start)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_two_ranks_train_alike(mesh: DeviceMesh, ranks: Ranks, strategy: str) -> None:
    sharding = f"actor.fsdp_config.sharding_strategy={strategy}"
    start, plain = (trained(mesh, training_config("ppo"), steps)["weights"] for steps in (0, 3))
    (whole, first), (_, second) = ranks.run(whole_and_own, training_config("ppo", COMPACT, sharding), 3)
    assert distance(whole, plain) < NEAR * distance(plain, start)
    assert same(first, second) == (strategy == "no_shard"), "replicas that round differently drift apart"


def whole_and_own(mesh: DeviceMesh, config: Config, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights (of rank 0 alone), and what this rank has of them."""
    learner = Learner(mesh, config)
    learner.train(steps)
    own = {name: p.detach() for name, p in learner.policy.named_parameters()}
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own.items()}
    return learner.weights(), {name: tensor.clone() for name, tensor in local.items()}


def test_a_resumed_run_is_the_same(mesh: DeviceMesh, ranks: Ranks, tmp_path: Path) -> None:
    config = training_config("ppo", COMPACT)
    for name, run in (("one", lambda *args: [args[0](mesh, *args[1:])]), ("two", ranks.run)):
        whole, again = run(save_and_go_on, config, tmp_path / name), run(load_and_go_on, config, tmp_path / name)
        for before, after in zip(whole, again, strict=True):
            assert same(after["loaded"], before["saved"])
            assert same(after["after"], before["after"]), name
        assert distance(whole[0]["after"], whole[0]["saved"]) > 0


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_can_change_the_type(mesh: DeviceMesh, tmp_path: Path, types: tuple[str, str]) -> None:
    saved, loaded = (Learner(mesh, training_config("ppo", f"actor.optim.state_dtype={dtype}")) for dtype in types)
    saved.train()
    save_actor(saved.policy, saved.optimizer, tmp_path)
    load_actor(loaded.policy, loaded.optimizer, tmp_path)
    for one, other in zip(saved.policy.parameters(), loaded.policy.parameters(), strict=True):
        before, after = saved.optimizer.state[one], loaded.optimizer.state[other]
        for name in ("exp_avg", "exp_avg_sq"):
            assert str(after[name].dtype) == f"torch.{types[1]}"
            assert ((after[name].float() - before[name].float()).abs() <= BFLOAT16_STEP * before[name].abs()).all()
        assert int(before["step"]) == int(after["step"]) > 0
    loaded.train(first=1)


def test_it_is_offloaded_between_updates(mesh: DeviceMesh) -> None:
    config = training_config("ppo", COMPACT)
    plain, moved = Learner(mesh, config), Learner(mesh, config)
    state, timer = TrainingState([moved.policy], moved.optimizer, "cpu"), PhaseTimer()
    for step in range(2):
        plain.train(first=step)
        with state.on_device(timer):
            moved.train(first=step)
    assert same(moved.weights(), plain.weights())
    assert held(moved.optimizer) == held(plain.optimizer)
