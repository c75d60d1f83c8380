"""Policies that act on a CUDA device, compiled and recorded as graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import Policy, PolicyOutput
from embodied_rl.models.compilation import compile_acting
from embodied_rl.workers.inference import MicroBatches
from tests.models.test_compilation import made

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


def moved(obs: EnvObs) -> EnvObs:
    return EnvObs(
        env_ids=obs.env_ids,
        images={name: image.cuda() for name, image in obs.images.items()},
        state=obs.state.cuda(),
        instructions=obs.instructions,
    )


@torch.inference_mode()
def act(policy: Policy, obs: EnvObs, size: int | None = None) -> PolicyOutput:
    return MicroBatches(size).act(policy, obs, greedy=False, temperature=1.0, seed=0)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["compiled", "graphs"])
@pytest.mark.parametrize("model", ["pi0", "pi05", "smolvla", "openvla", "openvla_oft"])
def test_compiled_and_eager_act_alike(model: str, cuda_graphs: bool, tmp_path: Path) -> None:
    (plain, obs), (compiled, _) = made(model, tmp_path / model), made(model, tmp_path / model)
    plain, compiled, obs = plain.cuda(), compiled.cuda(), moved(obs)
    compiled.load_state_dict(plain.state_dict())
    compile_acting(compiled, "cuda:0", cuda_graphs=cuda_graphs)
    for attempt in range(4):  # the first calls record, later ones replay
        one, other = act(plain, obs), act(compiled, obs)
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-3), attempt
        assert torch.allclose(one.actions, other.actions, atol=1e-4), attempt
    assert torch.allclose(act(plain, obs, 2).logprobs, act(compiled, obs, 2).logprobs, atol=1e-3)
    # A new version of the weights is written to where graphs find the old one.
    with torch.no_grad():
        for policy in (plain, compiled):
            torch.manual_seed(1)
            for parameter in policy.parameters():
                parameter.mul_(1.01).add_(0.05 * torch.randn(parameter.shape).to(parameter))
    assert torch.allclose(act(plain, obs).logprobs, act(compiled, obs).logprobs, atol=1e-3)


def test_graphs_are_replayed(tmp_path: Path) -> None:
    """All kernels of a denoising step are launched at once, so the host launches few."""
    (plain, obs), (compiled, _) = made("pi0", tmp_path / "pi0"), made("pi0", tmp_path / "pi0")
    plain, compiled, obs = plain.cuda(), compiled.cuda(), moved(obs)
    compile_acting(compiled, "cuda:0", cuda_graphs=True)
    for _ in range(3):
        act(compiled, obs)
    launches = []
    for policy in (plain, compiled):
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=both) as profile:
            act(policy, obs)
        names = [event.name for event in profile.events() or ()]
        launches.append(sum(name.startswith("cudaLaunchKernel") for name in names))
        graphs = sum(name == "cudaGraphLaunch" for name in names)
    assert graphs >= 3, "one for each of three steps"
    assert launches[1] < launches[0] / 2
