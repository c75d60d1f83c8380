"""Acting in buffers that stay, and compiled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicyOutput
from embodied_rl.models.compilation import compile_acting, require_compiler
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.openvla.network import TokenCache
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy, policy_class
from embodied_rl.workers.inference import MicroBatches
from tests.models.flow.flow_models import flow_spec, look
from tests.models.openvla.published import observe, write_checkpoint
from tests.models.openvla.published import spec as openvla_spec
from tests.models.small import fresh

FLOW = ("pi0", "pi05", "smolvla")


def made(model: str, folder: Path) -> tuple[Policy, EnvObs]:
    torch.manual_seed(0)
    if model in FLOW:
        if not folder.exists():
            policy_class(model).write_tiny(folder)  # type: ignore[attr-defined]
        return build_policy(model, flow_spec(), {"num_steps": 3}, str(folder)).requires_grad_(False), look()
    if not folder.exists():
        folder.mkdir()
        write_checkpoint(folder)
    spec = openvla_spec(chunks=1 if model == "openvla" else 3)
    return build_policy(model, spec, {}, str(folder)).requires_grad_(False), observe()


@torch.inference_mode()
def act(policy: Policy, obs: EnvObs, size: int | None = None) -> PolicyOutput:
    return MicroBatches(size).act(policy, obs, greedy=False, temperature=1.0, seed=0)


@pytest.mark.parametrize("model", FLOW)
def test_steps_in_place_are_those_that_append(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, obs = made(model, tmp_path / model)
    assert isinstance(policy, FlowPolicy)
    seen: list[Tensor] = []
    features = policy.features

    def watched(prefix: Any, steps: Any, x: Tensor, t: Tensor) -> Tensor:
        seen.extend(getattr(steps.cache, "buffers", {}).get(0, ()))
        return features(prefix, steps, x, t)

    monkeypatch.setattr(policy, "features", watched)
    in_place = act(policy, obs)
    assert len({tensor.data_ptr() for tensor in seen}) == 2, "keys and values stay where they are"
    assert len(seen) == 2 * 4, "three steps and the value"
    policy._in_place = False
    appended = act(policy, obs)
    assert torch.equal(in_place.actions, appended.actions)
    assert torch.equal(in_place.logprobs, appended.logprobs)
    assert torch.equal(in_place.values, appended.values)  # type: ignore[arg-type]
    assert len(seen) == 2 * 4


def test_tokens_are_decoded_in_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, obs = made("openvla", tmp_path / "openvla")
    assert isinstance(policy, OpenVlaPolicy)
    seen: list[tuple[int, torch.Size, int]] = []
    following = policy._next

    def watched(tokens: Tensor, mask: Tensor, cache: TokenCache) -> Tensor:
        last = following(tokens, mask, cache)
        seen.append((cache.layers[0][0].data_ptr(), cache.layers[0][0].shape, int(cache.filled)))
        return last

    monkeypatch.setattr(policy, "_next", watched)
    act(policy, obs)
    addresses, shapes, filled = zip(*seen, strict=True)
    assert len(set(addresses)) == len(set(shapes)) == 1
    length = shapes[0][2]
    assert filled == tuple(range(length - 5, length + 1)), "the last of seven tokens is not put in"


def test_a_buffer_of_graphs_is_used_again(tmp_path: Path) -> None:
    policy, obs = made("openvla", tmp_path / "openvla")
    assert isinstance(policy, OpenVlaPolicy)
    plain = act(policy, obs)
    policy.compile_acting(lambda function: function, cuda_graphs=True)
    assert policy._caches is not None
    for _ in range(2):
        found = act(policy, obs)
        assert torch.equal(found.actions, plain.actions)
        assert torch.allclose(found.logprobs, plain.logprobs, atol=1e-5)
    assert len(policy._caches) == 1


def test_buffers_of_graphs_are_freed_where_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, obs = made("openvla", tmp_path / "openvla")
    assert isinstance(policy, OpenVlaPolicy)
    plain = act(policy, obs)
    policy.compile_acting(lambda function: function, cuda_graphs=True)
    following = policy._next

    def crowded(tokens: Tensor, mask: Tensor, cache: TokenCache) -> Tensor:
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return following(tokens, mask, cache)

    monkeypatch.setattr(policy, "_next", crowded)
    found = act(policy, obs)
    assert torch.allclose(found.logprobs, plain.logprobs, atol=1e-5)
    assert policy._caches is not None
    assert [shape[0] for shape in policy._caches] == [2], "none for four"


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_every_number_of_observations_runs_compiled(monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool) -> None:
    compiler, ran = torch.compile, []

    def backend(module: Any, _: object) -> Any:
        return lambda *inputs: (ran.append(1), module.forward(*inputs))[1]

    def compiling(function: Any, *, mode: str | None = None, **options: Any) -> Any:
        return compiler(function, backend=backend, **options)

    class Doubling(torch.nn.Module):
        def compile_acting(self, compiled: Any, *, cuda_graphs: bool) -> None:
            self.double = compiled(lambda x: 2 * x)

    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.setattr("embodied_rl.models.compilation.require_compiler", lambda key, device: None)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        policy: Any = Doubling()
        compile_acting(policy, "cuda:0", cuda_graphs=cuda_graphs)
        for count in range(1, 13):
            assert torch.equal(policy.double(torch.ones(4 * count, 3)), torch.full((4 * count, 3), 2.0))
    assert len(ran) == 12


def test_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"rollout.cuda_graphs=true: this rollout worker is on cpu, and only CUDA"):
        compile_acting(fresh("tiny_vla"), "cpu", cuda_graphs=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"actor.torch_compile=true: torch.compile needs Triton for cuda:0"):
        require_compiler("actor.torch_compile", "cuda:0")


def test_no_compiler() -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": (None, "/no/such/compiler")}),
        pytest.raises(
            UserError, match=r"rollout.torch_compile=true: torch.compile needs a C\+\+ compiler and finds none"
        ),
    ):
        compile_acting(fresh("tiny_vla"), "cpu", cuda_graphs=False)


def test_triton_takes_no_c_plus_plus_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with config.patch({"cpp.cxx": (None, "/no/such/compiler")}):
        require_compiler("actor.torch_compile", "cuda:0")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = fresh("mlp")
    monkeypatch.setattr(policy, "shard_units", list)
    with pytest.raises(UserError, match=r"MlpPolicy names no blocks to compile"):
        compile_acting(policy, "cpu", cuda_graphs=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("model", ["pi05", "smolvla", "openvla", "openvla_oft"])
def test_compiled_and_eager_act_alike(model: str, tmp_path: Path) -> None:
    (plain, obs), (compiled, _) = made(model, tmp_path / model), made(model, tmp_path / model)
    compiled.load_state_dict(plain.state_dict())
    compile_acting(compiled, "cpu", cuda_graphs=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size in (None, 2):  # all four, and two at a time under the mode that counts draws
        one, other = act(plain, obs, size), act(compiled, obs, size)
        assert torch.allclose(one.actions, other.actions, atol=1e-5)
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-4)
        with torch.inference_mode():
            values = MicroBatches(size).values(compiled, obs)
        assert torch.allclose(values, one.values, atol=1e-5)  # type: ignore[arg-type]
        if model in FLOW:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
            assert graphs == (1 if size is None else 2), "one for each number of observations"
    # New weights are written into the old ones' tensors.
    with torch.no_grad():
        for policy in (plain, compiled):
            generator = torch.Generator().manual_seed(1)
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    assert torch.allclose(act(plain, obs).logprobs, act(compiled, obs).logprobs, atol=1e-4)
