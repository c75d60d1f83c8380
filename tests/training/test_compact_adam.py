"""Adam's moments in bfloat16 and in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from embodied_rl.checkpoints.shards import load_actor, save_actor
from embodied_rl.monitoring.timers import PhaseTimer
from embodied_rl.schema import Config
from embodied_rl.training.compact_adam import BLOCK, CompactAdamW, _coded, _rounded, codebook
from embodied_rl.training.sharding import TrainingState
from tests.stand_in import DEVICE, stand_in_accelerator
from tests.training.learner import Learner, distance, load_and_go_on, same, save_and_go_on, trained, training_config
from tests.training.ranks import Ranks

COMPACT = "actor.optim.state_dtype=bfloat16"
BYTES = "actor.optim.state_dtype=int8"
both = pytest.mark.parametrize("compact_state", [COMPACT, BYTES], ids=["bfloat16", "int8"])
BETAS = (0.9, 0.999)
NEAR = {COMPACT: 0.05, BYTES: 0.08}
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


def test_what_a_byte_stands_for() -> None:
    first, second = (codebook(name, torch.device("cpu")) for name in ("exp_avg", "exp_avg_sq"))
    assert torch.equal(first, -first.flip(0)) and first[len(first) // 2] == 0 and len(first) == 255
    # The decade below 1 in 64 steps, of which the last is 1 itself; then 32, 16, ... steps.
    assert first[-2].item() == pytest.approx(1 - 1.5 * 0.9 / 64)
    assert first[-64].item() == pytest.approx(0.1 + 0.5 * 0.9 / 64)
    assert first[-65].item() == pytest.approx(0.1 - 0.5 * 0.09 / 32)
    assert first[128].item() == pytest.approx(0.55e-6)
    assert second[0] == 0 and second[-1] == 1 and len(second) == 256
    assert second[-2].item() == pytest.approx((1 - 0.5 * 0.9 / 128) ** 2)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_bytes_are_drawn_with_the_values_mean_and_stand_for_themselves(name: str) -> None:
    codes = codebook(name, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [torch.tensor([-3.0 if name == "exp_avg" else 3.0]), torch.rand(BLOCK + 43, generator=generator)]
    )
    drawn, scales = zip(*(_coded(values, codes, generator) for _ in range(4000)), strict=True)
    assert scales[0].tolist() == [3.0, values[BLOCK:].max().item()]
    scale = torch.cat([scales[0][:1].expand(BLOCK), scales[0][1:].expand(44)])
    numbers = torch.stack([codes[d.int()] for d in drawn]) * scale
    assert numbers[0, 0] == values[0], "the largest of a block is exact"
    steps = (numbers.amax(0) - numbers.amin(0)).clamp(min=1e-7)
    # The mean of 4000 deviates by half a step / sqrt(4000) at most, 0.008. Near a code the other is not drawn.
    assert ((numbers.mean(0) - values).abs() <= 0.04 * steps + 1e-4).all()
    again, same_scales = _coded(numbers[0], codes, None)
    assert torch.equal(again, drawn[0]) and torch.equal(same_scales, scales[0])


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    values = torch.full((BLOCK,), 1e-25).index_fill_(0, torch.tensor([7]), 1.0).index_fill_(0, torch.tensor([8]), 0.0)
    drawn, _ = _coded(values, codebook("exp_avg_sq", torch.device("cpu")), torch.Generator().manual_seed(0))
    assert drawn[7] == 255 and drawn[8] == 0 and (drawn[9:] == 1).all()
    empty, scales = _coded(values[:0], codebook("exp_avg", torch.device("cpu")), None)
    assert empty.shape == scales.shape == (0,), "a rank may have nothing of a parameter"


@pytest.mark.parametrize("options", [(), ("model.lora.rank=2",)], ids=["all", "lora"])
def test_the_state_has_a_half_or_a_quarter_of_the_bytes(
    mesh: DeviceMesh, ranks: Ranks, options: tuple[str, ...]
) -> None:
    for size, numbers in [bytes_of_state(mesh, COMPACT, *options), *ranks.run(bytes_of_state, COMPACT, *options)]:
        assert size == 2 * 2 * numbers > 0
    size, numbers = bytes_of_state(mesh, BYTES, *options)
    assert 2 * numbers < size < 2 * numbers * 1.2, "small parameters have a scale, too"
    size, numbers = bytes_of_state(mesh, *options)
    assert size == 2 * 4 * numbers


def fitted(make: type[CompactAdamW] | type[AdamW], **options: Any) -> list[float]:
    """Losses of a small network that learns a function of one number."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = make([{"params": list(network.parameters())}], lr=0.01, betas=BETAS, eps=1e-8, **options)
    inputs = torch.linspace(-3, 3, 64)[:, None]
    losses = []
    for _ in range(600):
        loss = (network(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_it_learns_as_adamw_does(dtype: str) -> None:
    own, torchs = fitted(CompactAdamW, dtype=dtype), fitted(AdamW)
    assert own[-1] < own[0] / 500 and torchs[-1] < torchs[0] / 500
    assert sum(own) == pytest.approx(sum(torchs), rel=0.05)


@both
@pytest.mark.parametrize("options", [(), ("model.lora.rank=2",), ("actor.optim.clip_grad=0.05",)], ids=str)
def test_a_policy_trains_almost_alike(mesh: DeviceMesh, options: tuple[str, ...], compact_state: str) -> None:
    start, plain = (trained(mesh, training_config("ppo", *options), steps)["weights"] for steps in (0, 3))
    small = trained(mesh, training_config("ppo", compact_state, *options), 3)["weights"]
    assert 0 < distance(small, plain) < NEAR[compact_state] * distance(plain, start)


@both
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_two_ranks_train_alike(mesh: DeviceMesh, ranks: Ranks, strategy: str, compact_state: str) -> None:
    sharding = f"actor.fsdp_config.sharding_strategy={strategy}"
    start, plain = (trained(mesh, training_config("ppo"), steps)["weights"] for steps in (0, 3))
    (whole, first), (_, second) = ranks.run(whole_and_own, training_config("ppo", compact_state, sharding), 3)
    assert distance(whole, plain) < NEAR[compact_state] * distance(plain, start)
    assert same(first, second) == (strategy == "no_shard"), "replicas that round differently drift apart"


def whole_and_own(mesh: DeviceMesh, config: Config, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights (of rank 0 alone), and what this rank has of them."""
    learner = Learner(mesh, config)
    learner.train(steps)
    own = {name: p.detach() for name, p in learner.policy.named_parameters()}
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in own.items()}
    return learner.weights(), {name: tensor.clone() for name, tensor in local.items()}


@both
def test_a_resumed_run_is_the_same(mesh: DeviceMesh, ranks: Ranks, tmp_path: Path, compact_state: str) -> None:
    config = training_config("ppo", compact_state)
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


@both
def test_it_is_offloaded_between_updates(mesh: DeviceMesh, compact_state: str) -> None:
    config = training_config("ppo", compact_state)
    plain, moved = Learner(mesh, config), Learner(mesh, config)
    state, timer = TrainingState([moved.policy], moved.optimizer, "cpu"), PhaseTimer()
    for step in range(2):
        plain.train(first=step)
        with state.on_device(timer):
            moved.train(first=step)
    assert same(moved.weights(), plain.weights())
    assert held(moved.optimizer) == held(plain.optimizer)


@both
def test_offloaded_parts_stay_in_host_memory(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, compact_state: str
) -> None:
    """The mesh is the accelerator's, with ``cpu_offload`` and between updates, too."""
    parameter = nn.Parameter(distribute_tensor(torch.randn(300, 2), mesh, [Shard(0)]))
    dtype: Any = compact_state.split("=")[1]
    saved, loaded = (
        CompactAdamW([{"params": [parameter]}], lr=0.01, betas=BETAS, eps=1e-8, dtype=dtype) for _ in range(2)
    )
    parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(DeviceMesh, "device_type", property(lambda self: "meta"))
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    first, second = (optimizer.state_dict()["state"][0] for optimizer in (saved, loaded))
    for name in ("exp_avg", "exp_avg_sq"):
        assert first[name].shape == (300, 2)
        assert torch.equal(first[name].to_local(), second[name].to_local())
    loaded.step()
    for tensor in [*loaded.state[parameter].values(), *loaded.state_dict()["state"][0].values()]:
        assert (tensor.to_local() if isinstance(tensor, DTensor) else tensor).device.type == "cpu"


def test_bytes_are_saved_and_read_without_float32_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    cast = Optimizer._process_value_according_to_param_policy

    def noted(*args: Any) -> Tensor:
        moved.append(args[-1])
        return cast(*args)

    monkeypatch.setattr(Optimizer, "_process_value_according_to_param_policy", noted)
    with stand_in_accelerator():
        parameter = nn.Parameter(torch.randn(300, 2).to(DEVICE))
        first, second = (
            CompactAdamW([{"params": [parameter]}], lr=0.01, betas=BETAS, eps=1e-8, dtype="int8") for _ in range(2)
        )
        parameter.grad = torch.ones(300, 2).to(DEVICE)
        first.step()
        saved = first.state_dict()
        second.load_state_dict(saved)
        assert {saved["state"][0][name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}
        assert moved == ["step"], "and not all the moments at once"
        state, expected = second.state[parameter], first.state[parameter]
        assert state["exp_avg"].device.type == DEVICE and state["exp_avg"].dtype == torch.uint8
        assert all(torch.equal(state[name].cpu(), expected[name].cpu()) for name in expected)
