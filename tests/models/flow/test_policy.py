"""What ``pi0``, ``pi05`` and ``smolvla`` promise alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.errors import UserError
from embodied_rl.models.flow.policy import FlowPolicy
from embodied_rl.models.flow.prefix import resize_with_padding
from embodied_rl.models.registry import build_policy
from embodied_rl.models.weights.lora import add_adapters
from embodied_rl.training.sharding import checkpoint_blocks
from tests.models.flow.flow_models import POLICIES, A, C, N, decide, flow_policy, flow_spec, look, rows
from tests.models.small import settings

VARIANTS: dict[str, dict[str, Any]] = {
    "sde": {},
    "sde_all": {"stochastic_steps": "all"},
    "noise": {"noise_method": "flow_noise"},
}

each_model = pytest.mark.parametrize("model", sorted(POLICIES))
each_variant = pytest.mark.parametrize("variant", sorted(VARIANTS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, policy in POLICIES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        policy.write_tiny(folders[name])
    return folders


def trained(policy: FlowPolicy) -> set[str]:
    return {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@each_model
@each_variant
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("greedy", [False, True])
def test_evaluate_agrees_with_act(
    tiny: dict[str, Path], model: str, variant: str, temperature: float, greedy: bool
) -> None:
    policy = flow_policy(model, tiny[model], **VARIANTS[variant])
    decided = decide(policy, look(), temperature=temperature, greedy=greedy)
    again = policy(decided.replay_inputs, temperature=temperature)
    assert torch.allclose(again.logprobs, decided.logprobs, atol=1e-5)
    assert decided.values is not None
    assert torch.allclose(again.values, decided.values, atol=1e-5)
    assert torch.allclose(policy.values(look()), decided.values, atol=1e-5)
    for tensor in (decided.actions, decided.logprobs, again.logprobs, again.entropy):
        assert tensor.shape == (N, C, A)
        assert tensor.dtype == torch.float32
    assert decided.actions.abs().max() <= 1.0
    assert all(len(tensor) == N for tensor in decided.replay_inputs.values())
    assert not torch.allclose(policy(decided.replay_inputs, temperature=3.0).logprobs, again.logprobs, atol=1e-2)


@each_model
@pytest.mark.parametrize("values", [0, C])
def test_there_are_as_many_values_as_asked_for(tiny: dict[str, Path], model: str, values: int) -> None:
    policy = flow_policy(model, tiny[model], values=values)
    decided = decide(policy, look())
    if values:
        assert decided.values is not None
        assert decided.values.shape == (N, values)
        assert policy.value_parameters()
        return
    assert decided.values is None
    assert policy(decided.replay_inputs, temperature=1.0).values is None
    with pytest.raises(RuntimeError, match="without value head"):
        policy.values(look())


@each_model
@each_variant
def test_a_sample_does_not_depend_on_its_batch(tiny: dict[str, Path], model: str, variant: str) -> None:
    """Alone, its prompt is padded to another length."""
    policy = flow_policy(model, tiny[model], **VARIANTS[variant])
    decided = decide(policy, look())
    for row in range(N):
        alone = {name: tensor[row : row + 1] for name, tensor in decided.replay_inputs.items()}
        evaluation = policy(alone, temperature=1.0)
        assert torch.allclose(evaluation.logprobs[0], decided.logprobs[row], atol=1e-4)
        assert decided.values is not None
        assert torch.allclose(evaluation.values[0], decided.values[row], atol=1e-5)


@each_model
def test_the_generator_decides(tiny: dict[str, Path], model: str) -> None:
    policy, obs = flow_policy(model, tiny[model]), look()
    first = decide(policy, obs, seed=3)
    assert torch.equal(decide(policy, obs, seed=3).actions, first.actions)
    assert not torch.equal(decide(policy, obs, seed=4).actions, first.actions)
    with pytest.raises(ValueError, match="greedy=True takes the mode"):
        decide(policy, obs, temperature=0.0)


@each_model
def test_the_network_sees_each_camera_the_instruction_and_the_state(tiny: dict[str, Path], model: str) -> None:
    policy, obs = flow_policy(model, tiny[model]), look()
    plain = decide(policy, obs).actions
    for camera in obs.images:
        images = {name: 255 - image if name == camera else image for name, image in obs.images.items()}
        changed = dataclasses.replace(obs, images=images)
        assert not torch.allclose(decide(policy, changed).actions, plain, atol=1e-4)
    for changed in (
        dataclasses.replace(obs, state=obs.state + 0.5),
        dataclasses.replace(obs, instructions=obs.instructions[::-1]),
    ):
        assert not torch.allclose(decide(policy, changed).actions, plain, atol=1e-4)


@each_model
@each_variant
def test_gradients_reach_the_expert_and_not_the_frozen_part(tiny: dict[str, Path], model: str, variant: str) -> None:
    policy = flow_policy(model, tiny[model], **VARIANTS[variant])
    evaluation = policy(decide(policy, look()).replay_inputs, temperature=1.0)
    assert evaluation.values is not None
    (evaluation.logprobs.square().mean() + evaluation.values.square().mean()).backward()
    wanted = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained(policy) == wanted
    frozen = {name for name, _ in policy.frozen_modules()[0].named_parameters()}
    assert not any(name.endswith(tuple(f".{part}" for part in frozen)) and ".vlm." in name for name in wanted)
    assert any(".layers.0.mlp" in name for name in wanted)


@each_model
def test_the_value_loss_trains_the_head_alone_unless_asked(tiny: dict[str, Path], model: str) -> None:
    for detach in (True, False):
        policy = flow_policy(model, tiny[model], detach_critic_input=detach)
        evaluation = policy(decide(policy, look()).replay_inputs, temperature=1.0)
        assert evaluation.values is not None
        evaluation.values.sum().backward()
        assert all(name.startswith("value_head.") for name in trained(policy)) == detach


@each_model
def test_all_of_it_can_be_trained(tiny: dict[str, Path], model: str) -> None:
    """Of the prefix's last layer only keys and values are used: its other weights' gradients are there, and zero."""
    grads = []
    for checkpointing in (False, True):
        policy = flow_policy(model, tiny[model], train_expert_only=False)
        inputs = decide(policy, look()).replay_inputs
        if checkpointing:
            checkpoint_blocks(policy)
        evaluation = policy(inputs, temperature=1.0)
        assert evaluation.values is not None
        (evaluation.logprobs.square().mean() + evaluation.values.square().mean()).backward()
        assert [name for name, p in policy.named_parameters() if p.grad is None] == []
        silent = {name for name, _ in policy.named_parameters()} - trained(policy)
        assert all(".layers.1." in name or name.endswith(".norm.weight") for name in silent), silent
        grads.append({name: p.grad for name, p in policy.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], atol=1e-5), name


@each_model
@pytest.mark.parametrize("expert_only", [True, False])
def test_adapters_train_what_they_are_in(tiny: dict[str, Path], model: str, expert_only: bool) -> None:
    policy = flow_policy(model, tiny[model], train_expert_only=expert_only)
    inputs = decide(policy, look()).replay_inputs
    plain = policy(inputs, temperature=1.0).logprobs.detach()
    add_adapters(policy, settings())
    evaluation = policy(inputs, temperature=1.0)
    assert torch.allclose(evaluation.logprobs, plain, atol=1e-6)
    assert evaluation.values is not None
    (evaluation.logprobs.square().mean() + evaluation.values.square().mean()).backward()
    names = trained(policy)
    assert all(".lora_" in name or name.startswith("value_head.") for name in names)
    assert any(".lora_" in name for name in names)
    assert any(".vlm." in name for name in names) != expert_only


@each_model
def test_a_folder_is_written_and_read(tiny: dict[str, Path], model: str, tmp_path: Path) -> None:
    policy = flow_policy(model, tiny[model], noise_method="flow_noise")
    policy.save_pretrained(tmp_path / "copy")
    spec, params = flow_spec(), {"num_steps": 3, "noise_method": "flow_noise"}
    again = build_policy(model, spec, params, str(tmp_path / "copy"))
    own, theirs = policy.state_dict(), again.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert isinstance(again, FlowPolicy)
    assert torch.equal(decide(again, look()).actions, decide(policy, look()).actions)
    published = {path.name for path in tiny[model].iterdir()}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == published | {
        "value_head.safetensors",
        "noise_head.safetensors",
    }


@each_model
def test_a_tiny_folder_is_always_the_same_and_small(tiny: dict[str, Path], model: str, tmp_path: Path) -> None:
    POLICIES[model].write_tiny(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (tiny[model] / path.name).read_bytes(), path.name
    policy = build_policy(model, flow_spec(values=0), {}, str(tmp_path))
    assert sum(p.numel() for p in policy.parameters()) < 1e6


@each_model
def test_demonstrations_are_scored_by_their_velocity_error(tiny: dict[str, Path], model: str) -> None:
    policy, obs = flow_policy(model, tiny[model]), look()
    actions = torch.rand(N, C, A, generator=torch.Generator().manual_seed(5)) * 2 - 1
    inputs = policy.demonstration(obs, actions, torch.Generator().manual_seed(6))
    assert all(len(tensor) == N for tensor in inputs.values())
    assert torch.equal(policy.demonstration(obs, actions, torch.Generator().manual_seed(6))["time"], inputs["time"])
    other = policy.demonstration(obs, actions, torch.Generator().manual_seed(7))
    assert not torch.equal(other["time"], inputs["time"])

    statistics = {name.removeprefix("action."): tensor for name, tensor in policy.folder.statistics.items()}
    if model == "pi05":
        normalized = 2 * (actions - statistics["q01"]) / (statistics["q99"] - statistics["q01"]) - 1
    else:
        normalized = (actions - statistics["mean"]) / statistics["std"]
    assert torch.allclose(inputs["targets"][:, :C, :A], normalized, atol=1e-4)
    assert torch.equal(inputs["targets"][:, C:], inputs["targets"][:, C - 1 : C].expand_as(inputs["targets"][:, C:]))
    evaluation = policy(inputs, temperature=1.0)
    with torch.no_grad():
        t = inputs["time"][:, None, None]
        x = t * inputs["noise"] + (1 - t) * inputs["targets"]
        velocity, _ = policy._velocity_of(policy._prefix(inputs))(x, inputs["time"])
    error = (velocity[:, :C, :A] - (inputs["noise"][:, :C, :A] - normalized)).square()
    assert torch.allclose(evaluation.logprobs, -error, rtol=1e-3, atol=1e-4)

    before = evaluation.logprobs.mean().item()
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(15):
        optimizer.zero_grad()
        loss = -policy(inputs, temperature=1.0).logprobs.mean()
        loss.backward()
        optimizer.step()
    assert policy(inputs, temperature=1.0).logprobs.mean().item() > 0.7 * before


@each_model
def test_bfloat16_weights_keep_float32_probabilities(tiny: dict[str, Path], model: str) -> None:
    policy = flow_policy(model, tiny[model], dtype="bfloat16")
    assert next(policy.frozen_modules()[0].parameters()).dtype == torch.bfloat16
    decided = decide(policy, look())
    evaluation = policy(decided.replay_inputs, temperature=1.0)
    assert decided.logprobs.dtype == evaluation.logprobs.dtype == torch.float32
    assert torch.allclose(evaluation.logprobs, decided.logprobs, atol=1e-5)
    full = flow_policy(model, tiny[model])
    assert (decide(full, look()).actions - decided.actions).abs().mean() < 0.1


@each_model
def test_each_transformer_layer_is_a_shard_unit(tiny: dict[str, Path], model: str) -> None:
    policy = flow_policy(model, tiny[model])
    units = policy.shard_units()
    assert len(units) == 6  # two layers each of vision, language and expert
    assert len({id(unit) for unit in units} & {id(module) for module in policy.modules()}) == 6


@each_model
def test_refusals_say_what_to_do(tiny: dict[str, Path], model: str) -> None:
    with pytest.raises(UserError, match=r"needs model\.path"):
        build_policy(model, flow_spec(), {})
    with pytest.raises(UserError, match=r"num_action_chunks=17.*predicts 16"):
        build_policy(model, flow_spec(chunks=17), {}, str(tiny[model]))
    other = {"pi0": "pi05", "pi05": "smolvla", "smolvla": "pi0"}[model]
    with pytest.raises(UserError, match=f"is of type '{other}', expected '{model}'"):
        build_policy(model, flow_spec(), {}, str(tiny[other]))
    for field, value in (("state_dim", 5), ("action_dim", 6)):
        with pytest.raises(UserError, match=f"dimensions and the env's {value}"):
            build_policy(model, dataclasses.replace(flow_spec(), **{field: value}), {}, str(tiny[model]))
    policy = flow_policy(model, tiny[model])
    room = {"pi0": 48, "pi05": 200, "smolvla": 48}[model]
    long = dataclasses.replace(rows(look(), slice(1)), instructions=("drawer " * room,))
    with pytest.raises(UserError, match=f"tokens and the policy takes {room}"):
        decide(policy, long)


@each_model
def test_the_gripper_can_be_inverted(tiny: dict[str, Path], model: str) -> None:
    plain, inverted = (flow_policy(model, tiny[model], invert_gripper=flag) for flag in (False, True))
    one, other = decide(plain, look()), decide(inverted, look())
    assert torch.equal(one.actions[..., :-1], other.actions[..., :-1])
    assert torch.equal(one.actions[..., -1], -other.actions[..., -1])
    actions = torch.zeros(N, C, A)
    actions[..., -1] = 0.5
    targets = [p.demonstration(look(), actions)["targets"][0, 0, A - 1] for p in (plain, inverted)]
    assert targets[0] - targets[1] == pytest.approx(1.0)  # the tiny folder's deviation is 1


def test_pictures_are_resized_with_black_beside_them() -> None:
    images = torch.full((1, 2, 4, 3), 255, dtype=torch.uint8)
    centered = resize_with_padding(images, (8, 8), centered=True)
    assert centered.shape == (1, 3, 8, 8)
    assert torch.equal(centered[0, 0, :, 0], torch.tensor([-1.0, -1, 1, 1, 1, 1, -1, -1]))
    left_top = resize_with_padding(images, (8, 8), centered=False)
    assert torch.equal(left_top[0, 0, :, 0], torch.tensor([-1.0, -1, -1, -1, 1, 1, 1, 1]))
    same = torch.randint(0, 256, (1, 8, 8, 3), dtype=torch.uint8)
    assert torch.allclose(resize_with_padding(same, (8, 8), centered=True)[0, 1], same[0, :, :, 1] / 127.5 - 1.0)
