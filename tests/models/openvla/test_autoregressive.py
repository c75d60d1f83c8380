from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicyOutput
from embodied_rl.models.openvla.policy import OpenVlaPolicy
from embodied_rl.models.registry import build_policy
from tests.models.openvla.published import observe, spec, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_checkpoint(directory, shards=3)
    return directory


def load(folder: Path, *, values: int = 1, **params: Any) -> OpenVlaPolicy:
    torch.manual_seed(0)
    policy = build_policy("openvla", spec(chunks=1, values=values), params, str(folder))
    assert isinstance(policy, OpenVlaPolicy)
    return policy


def act(policy: OpenVlaPolicy, *, seed: int = 0, greedy: bool = False, temperature: float = 1.6) -> PolicyOutput:
    return policy.act(observe(), greedy=greedy, temperature=temperature, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_evaluate_agrees_with_act(folder: Path, temperature: float, greedy: bool) -> None:
    policy = load(folder)
    decided = act(policy, greedy=greedy, temperature=temperature)
    again = policy(decided.replay_inputs, temperature=temperature, with_distribution=True)
    assert torch.allclose(again.logprobs, decided.logprobs, atol=1e-5)
    assert decided.values is not None and again.values is not None and again.distribution is not None
    assert torch.allclose(again.values, decided.values, atol=1e-5)
    assert torch.allclose(policy.values(observe()), decided.values, atol=1e-5)
    distribution = torch.distributions.Categorical(**again.distribution)
    assert torch.allclose(distribution.entropy(), again.entropy, atol=1e-5)
    alone = policy({name: tensor[1:2] for name, tensor in decided.replay_inputs.items()}, temperature=temperature)
    assert torch.allclose(alone.logprobs[0], decided.logprobs[1], atol=1e-5)


def test_later_tokens_depend_on_earlier_ones_alone(folder: Path) -> None:
    policy = load(folder)
    inputs = dict(act(policy).replay_inputs)
    before = policy(inputs, temperature=1.0).entropy[:, 0]
    tokens = inputs["tokens"].clone()
    tokens[:, 0, 3] = 31744 + (tokens[:, 0, 3] - 31744 + 100) % 256
    after = policy({**inputs, "tokens": tokens}, temperature=1.0).entropy[:, 0]
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] - after[:, 4:]).abs().min() > 1e-6


def test_the_generator_alone_decides(folder: Path) -> None:
    policy = load(folder)
    first = act(policy, seed=3).actions
    torch.manual_seed(5)
    assert torch.equal(act(policy, seed=3).actions, first)
    assert not torch.equal(act(policy, seed=4).actions, first)


def test_a_demonstration_is_its_tokens(folder: Path) -> None:
    policy = load(folder)
    decided = act(policy)
    inputs = policy.demonstration(observe(), decided.actions)
    assert decided.tokens is not None
    # Two tokens mean the last bin; a gripper has one of each.
    same = inputs["tokens"] == decided.tokens.clamp(min=31745)
    assert same[..., :6].float().mean() > 0.9
    assert torch.allclose(policy.codec.to_env(policy.codec.normalized(inputs["tokens"])), decided.actions, atol=5e-3)
    assert set(inputs["tokens"][..., 6].unique().tolist()) <= {31744, 31872}
    logprobs = policy(inputs, temperature=1.0).logprobs
    logprobs.mean().backward()
    assert policy.network.projector.fc1.weight.grad is not None


def test_a_chunk_has_one_action(folder: Path) -> None:
    with pytest.raises(UserError, match=r"num_action_chunks: got 3, expected 1: openvla decides on one"):
        build_policy("openvla", spec(chunks=3), {}, str(folder))
    with pytest.raises(UserError, match=r"make-tiny model=openvla <folder>"):
        build_policy("openvla", spec(chunks=1), {})


def test_the_folder_is_written_back(folder: Path, tmp_path: Path) -> None:
    policy = load(folder, values=0)
    policy.save_pretrained(tmp_path)
    assert not (tmp_path / "value_head.safetensors").exists()
    loaded = load(tmp_path, values=0)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in policy.state_dict().items())
    with pytest.raises(RuntimeError, match="without value head"):
        policy.values(observe())


def test_a_tiny_folder(tmp_path: Path) -> None:
    OpenVlaPolicy.write_tiny(tmp_path)
    policy = build_policy("openvla", spec(chunks=1), {"suite": "libero_90"}, str(tmp_path))
    assert policy.act(observe(), greedy=True, temperature=1.0, generator=None).actions.shape == (4, 1, 7)
