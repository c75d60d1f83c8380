"""What every policy promises, for every policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from embodied_rl.contracts import EnvObs
from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy, PolicyOutput, PolicySpec
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.precision import hold_in

N, C, A, S = 5, 4, 2, 4
SIZES: Mapping[str, dict[str, Any]] = {
    "cnn": {"hidden_size": 64, "image_features": 64},
    "mlp": {"hidden_size": 32},
    "residual": {
        "base_params": {"hidden_size": 32, "num_layers": 2},
        "corrections_per_chunk": 2,
        "hidden_size": 32,
        "scale": 0.5,
    },
    "tiny_vla": {"hidden_size": 32, "num_layers": 2},
}
"""The tiny size of each model."""
IMAGES: Mapping[str, dict[str, tuple[int, int]]] = {
    "cnn": {"agentview": (36, 44), "wrist": (40, 40)},
    "mlp": {},
    "residual": {"agentview": (40, 32), "wrist": (32, 32)},
    "tiny_vla": {"agentview": (40, 32), "wrist": (32, 32)},
}

pytestmark = pytest.mark.parametrize("model_type", sorted(SIZES))


def make(model_type: str, *, values: int = 1, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    spec = PolicySpec(
        action_dim=A, num_action_chunks=C, state_dim=S, image_shapes=IMAGES[model_type], values_per_chunk=values
    )
    policy = build_policy(model_type, spec, SIZES[model_type])
    # Fresh weights make nearly uniform policies, in which an error could hide.
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def observe(model_type: str, n: int = N, seed: int = 0) -> EnvObs:
    generator = torch.Generator().manual_seed(seed)
    texts = ("pick up the red cube", "open the drawer", "Push the plate!")
    return EnvObs(
        env_ids=torch.arange(n),
        images={
            name: torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in IMAGES[model_type].items()
        },
        state=torch.randn(n, S, generator=generator),
        instructions=tuple(texts[i % 3] for i in range(n)),
    )


def take(obs: EnvObs, rows: slice) -> EnvObs:
    return EnvObs(
        env_ids=obs.env_ids[rows],
        images={name: image[rows] for name, image in obs.images.items()},
        state=obs.state[rows],
        instructions=obs.instructions[rows],
    )


def act(policy: Policy, obs: EnvObs, *, seed: int = 0, greedy: bool = False, temperature: float = 1.0) -> PolicyOutput:
    return policy.act(obs, greedy=greedy, temperature=temperature, generator=torch.Generator().manual_seed(seed))


def test_cameras_have_any_names(model_type: str) -> None:
    """Such as LeRobot's, in which torch would take the dots for submodules. Sorted they stand in the same order."""
    names = {"agentview": "observation.images.top", "wrist": "robot/wrist.left"}
    policy, obs = make(model_type), observe(model_type)
    spec = dataclasses.replace(
        policy.spec, image_shapes={names[name]: size for name, size in policy.spec.image_shapes.items()}
    )
    renamed = build_policy(model_type, spec, SIZES[model_type])
    renamed.load_state_dict(dict(zip(renamed.state_dict(), policy.state_dict().values(), strict=True)))
    decided = act(renamed, dataclasses.replace(obs, images={names[name]: image for name, image in obs.images.items()}))
    expected = act(policy, obs)
    assert torch.equal(decided.actions, expected.actions)
    again, first = (p(d.replay_inputs, temperature=1.0) for p, d in ((renamed, decided), (policy, expected)))
    assert torch.equal(again.logprobs, first.logprobs)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 1.6, 0.5])
def test_evaluate_agrees_with_act(model_type: str, temperature: float, greedy: bool) -> None:
    policy = make(model_type)
    decided = act(policy, observe(model_type), greedy=greedy, temperature=temperature)
    again = policy(decided.replay_inputs, temperature=temperature)
    assert torch.allclose(again.logprobs, decided.logprobs, atol=1e-5)
    assert decided.values is not None
    assert torch.allclose(again.values, decided.values, atol=1e-5)
    other = policy(decided.replay_inputs, temperature=2 * temperature)
    assert not torch.allclose(other.logprobs, decided.logprobs, atol=1e-2)


@pytest.mark.parametrize("values", [0, 1, C])
def test_shapes_and_dtypes(model_type: str, values: int) -> None:
    policy, obs = make(model_type, values=values), observe(model_type)
    decided = act(policy, obs)
    evaluation = policy(decided.replay_inputs, temperature=1.0)
    for tensor in (decided.actions, decided.logprobs, evaluation.logprobs, evaluation.entropy):
        assert tensor.shape == (N, C, A)
        assert tensor.dtype == torch.float32
    assert decided.actions.abs().max() <= 1.0
    assert not decided.logprobs.requires_grad
    assert evaluation.logprobs.requires_grad
    assert all(tensor.shape[0] == N for tensor in decided.replay_inputs.values())
    if values:
        assert decided.values is not None
        assert evaluation.values is not None
        assert decided.values.shape == evaluation.values.shape == (N, values)
        assert torch.allclose(policy.values(obs), decided.values, atol=1e-6)
        assert policy.value_parameters()
    else:
        assert decided.values is None
        assert evaluation.values is None
        assert not policy.value_parameters()
        with pytest.raises(RuntimeError, match="without value head"):
            policy.values(obs)


def test_the_generator_alone_decides(model_type: str) -> None:
    policy, obs = make(model_type), observe(model_type)
    torch.manual_seed(1)
    first = act(policy, obs, seed=3)
    torch.manual_seed(2)
    assert torch.equal(act(policy, obs, seed=3).actions, first.actions)
    assert not torch.equal(act(policy, obs, seed=4).actions, first.actions)
    assert torch.equal(act(policy, obs, seed=3, greedy=True).actions, act(policy, obs, seed=4, greedy=True).actions)


def test_a_temperature_of_0_is_refused(model_type: str) -> None:
    policy, obs = make(model_type), observe(model_type)
    with pytest.raises(ValueError, match="greedy=True takes the"):
        act(policy, obs, temperature=0.0)


def test_samples_have_the_probabilities_they_report(model_type: str) -> None:
    """Over many samples of one state, the mean of -log p is the entropy."""
    policy = make(model_type, values=0)
    one = take(observe(model_type), slice(1))
    many = dataclasses.replace(
        one,
        env_ids=torch.arange(400),
        images={name: image.expand(400, -1, -1, -1) for name, image in one.images.items()},
        state=one.state.expand(400, -1),
        instructions=one.instructions * 400,
    )
    decided = act(policy, many, temperature=0.7)
    entropy = policy(decided.replay_inputs, temperature=0.7).entropy
    surprise = -decided.logprobs
    error = (surprise - entropy).mean().abs()
    assert error < 4 * surprise.std() / surprise.numel() ** 0.5


def test_a_sample_does_not_depend_on_its_batch(model_type: str) -> None:
    policy, obs = make(model_type), observe(model_type)
    decided = act(policy, obs)
    for row in range(N):
        alone = policy({name: tensor[row : row + 1] for name, tensor in decided.replay_inputs.items()}, temperature=1.0)
        assert torch.allclose(alone.logprobs[0], decided.logprobs[row], atol=1e-5)
    half = act(policy, take(obs, slice(2, None)), greedy=True)
    assert torch.allclose(half.actions, act(policy, obs, greedy=True).actions[2:], atol=1e-5)


@pytest.mark.parametrize("values", [0, 1])
def test_gradients_reach_every_parameter(model_type: str, values: int) -> None:
    policy = make(model_type, values=values)
    decided = act(policy, observe(model_type))
    evaluation = policy(decided.replay_inputs, temperature=1.0)
    loss = evaluation.logprobs.square().mean()
    if evaluation.values is not None:
        loss = loss + evaluation.values.square().mean()
    loss.backward()
    trained = {name: p for name, p in policy.named_parameters() if not name.startswith("base.")}
    assert all(p.requires_grad for p in trained.values())
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_sharding_finds_the_tensors_of_an_evaluation(model_type: str) -> None:
    """A backward pass gathers the weights when it comes to them; torch 2.11 looks for them in registered classes."""
    policy, obs = make(model_type), observe(model_type)
    evaluation = policy.evaluate(act(policy, obs).replay_inputs, temperature=1.0)
    found = {id(leaf) for leaf in tree_leaves(evaluation)}
    assert {id(evaluation.logprobs), id(evaluation.entropy), id(evaluation.values)} <= found


def test_state_dict_carries_everything(model_type: str) -> None:
    policy, obs = make(model_type, seed=0), observe(model_type)
    other = make(model_type, seed=1)
    decided = act(policy, obs)
    assert not torch.equal(act(other, obs).logprobs, decided.logprobs)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(act(other, obs).logprobs, decided.logprobs)


def test_shard_units_are_its_own_modules(model_type: str) -> None:
    policy = make(model_type)
    modules = set(policy.modules())
    assert all(unit in modules for unit in policy.shard_units())
    assert len(policy.shard_units()) == {"cnn": 4, "mlp": 2, "residual": 4, "tiny_vla": 2}[model_type]


def test_a_folder_gives_the_same_policy(model_type: str, tmp_path: Path) -> None:
    policy = make(model_type)
    policy.save_pretrained(tmp_path)
    loaded = build_policy(model_type, policy.spec, SIZES[model_type], str(tmp_path))
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in policy.state_dict().items())
    headless = build_policy(
        model_type, dataclasses.replace(policy.spec, values_per_chunk=0), SIZES[model_type], str(tmp_path)
    )
    obs = observe(model_type)
    assert torch.equal(act(headless, obs).actions, act(policy, obs).actions)


def test_a_folder_of_another_policy_is_refused(model_type: str, tmp_path: Path) -> None:
    policy = make(model_type)
    policy.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"choose the model and model\.params that the weights were made with"):
        build_policy(model_type, policy.spec, {}, str(tmp_path))
    narrow = dataclasses.replace(policy.spec, num_action_chunks=C + 2)
    with pytest.raises(UserError, match=r"the weights do not fit the model: .* is \[.*\], expected \["):
        build_policy(model_type, narrow, SIZES[model_type], str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match="is damaged"):
        build_policy(model_type, policy.spec, SIZES[model_type], str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"does not exist; the folder holds config\.json"):
        build_policy(model_type, policy.spec, SIZES[model_type], str(tmp_path))


def test_imitation_makes_the_demonstrated_actions_likely(model_type: str) -> None:
    policy, obs = make(model_type), observe(model_type)
    actions = torch.rand(N, C, A, generator=torch.Generator().manual_seed(3)) * 2 - 1
    if model_type == "residual":  # it reaches so far, and no further
        actions = act(policy, obs, seed=3).actions
        assert (actions - act(policy, obs, greedy=True).actions).abs().mean() > 0.1
    inputs = policy.demonstration(obs, actions)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(300):  # at three times the rate the convolutions died in one of six roundings of their weights
        optimizer.zero_grad()
        (-policy(inputs, temperature=1.0).logprobs.mean()).backward()
        optimizer.step()
    decided = act(policy, obs, greedy=True)
    assert (decided.actions - actions).abs().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_acts_with_rounded_weights(model_type: str, dtype: torch.dtype) -> None:
    """Half the bytes, nearly the same decisions, and buffers and a float32 root as they were."""
    whole, rounded = make(model_type), make(model_type)
    hold_in(rounded, dtype)
    sizes = [sum(p.nbytes for p in policy.parameters()) for policy in (whole, rounded)]
    assert sizes[1] <= 0.51 * sizes[0]
    if whole.float32_root:
        assert rounded.get_parameter("log_std").dtype == torch.float32
    for (name, before), (_, after) in zip(whole.named_buffers(), rounded.named_buffers(), strict=True):
        assert torch.equal(before, after), name
    obs = observe(model_type)
    taken = act(rounded, obs)
    assert taken.logprobs.dtype == taken.actions.dtype == torch.float32
    with torch.no_grad():
        exact = whole(taken.replay_inputs, temperature=1.0)
    gap = (exact.logprobs - taken.logprobs).abs().mean()
    assert 0 < gap < 0.05
    assert taken.values is not None and exact.values is not None
    assert torch.allclose(taken.values, exact.values, atol=0.1)
