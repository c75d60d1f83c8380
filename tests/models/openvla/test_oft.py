from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.models.base import PolicyOutput
from embodied_rl.models.openvla.oft import OpenVlaOftPolicy
from embodied_rl.models.registry import build_policy
from tests.models.openvla.published import HIDDEN, observe, spec, write_checkpoint

BOTH: dict[str, Any] = {"cameras": ["agentview", "wrist"]}
ALL: dict[str, Any] = {**BOTH, "use_proprio": True, "action_head": "discrete"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    write_checkpoint(directory, l1=True)
    return directory


@pytest.fixture(scope="module")
def weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return write_checkpoint(tmp_path_factory.mktemp("again"), l1=True)


def load(folder: Path, *, chunks: int = 3, values: int = 1, **params: Any) -> OpenVlaOftPolicy:
    torch.manual_seed(0)
    policy = build_policy("openvla_oft", spec(chunks=chunks, values=values), params, str(folder))
    assert isinstance(policy, OpenVlaOftPolicy)
    return policy


def act(policy: OpenVlaOftPolicy, *, seed: int = 0, greedy: bool = False, temperature: float = 1.6) -> PolicyOutput:
    return policy.act(observe(), greedy=greedy, temperature=temperature, generator=torch.Generator().manual_seed(seed))


def test_without_the_stop_token(folder: Path) -> None:
    """The slots are then the last places: each is read one place before it."""
    policy = load(folder, **ALL, keep_stop_token=False)
    decided = act(policy)
    inputs = decided.replay_inputs
    assert policy.proprio_projector is not None and decided.tokens is not None
    with torch.no_grad():
        extra = policy.proprio_projector(inputs["proprio"])[:, None]
        sequence = policy._sequence(inputs, extra=extra, tail=torch.zeros(4, 21, HIDDEN))
        logits = policy.network.action_logits(policy.network.hidden(*sequence, causal=False)[:, -22:-1])
    expected = (logits / 1.6).log_softmax(-1).gather(-1, decided.tokens.flatten(1)[..., None] - 31744)
    assert torch.allclose(decided.logprobs.flatten(1), expected[..., 0], atol=1e-5)
    kept = load(folder, **ALL)(inputs, temperature=1.6)
    assert (kept.logprobs - decided.logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_evaluate_agrees_with_act(folder: Path, temperature: float, greedy: bool) -> None:
    policy = load(folder, **ALL)
    decided = act(policy, greedy=greedy, temperature=temperature)
    again = policy(decided.replay_inputs, temperature=temperature, with_distribution=True)
    assert torch.allclose(again.logprobs, decided.logprobs, atol=1e-5)
    assert decided.values is not None and again.values is not None and decided.tokens is not None
    assert torch.allclose(again.values, decided.values, atol=1e-5)
    assert torch.allclose(policy.values(observe()), decided.values, atol=1e-5)
    assert again.distribution is not None
    distribution = torch.distributions.Categorical(**again.distribution)
    assert torch.allclose(distribution.log_prob(decided.tokens - 31744), decided.logprobs, atol=1e-5)
    alone = policy({name: tensor[1:2] for name, tensor in decided.replay_inputs.items()}, temperature=temperature)
    assert torch.allclose(alone.logprobs[0], decided.logprobs[1], atol=1e-5)


@pytest.mark.parametrize("values", [0, 1, 3])
def test_shapes_and_records(folder: Path, values: int) -> None:
    policy = load(folder, values=values, max_prompt_tokens=20, **ALL)
    decided = act(policy)
    assert {name: (tuple(t.shape), t.dtype) for name, t in decided.replay_inputs.items()} == {
        "prompt_ids": ((4, 20), torch.int64),
        "images": ((4, 2, 28, 28, 3), torch.uint8),
        "proprio": ((4, 8), torch.float32),
        "tokens": ((4, 3, 7), torch.int64),
    }
    assert decided.actions.shape == decided.logprobs.shape == (4, 3, 7)
    assert decided.actions.dtype == decided.logprobs.dtype == torch.float32
    assert decided.actions.abs().max() <= 1
    assert set(decided.actions[..., 6].unique().tolist()) <= {-1.0, 1.0}
    assert decided.tokens is not None
    assert (decided.tokens >= 31744).all() and (decided.tokens < 32000).all()
    if values:
        assert decided.values is not None and decided.values.shape == (4, values)
        assert len(policy.value_parameters()) == 5
    else:
        assert decided.values is None
        with pytest.raises(RuntimeError, match="without value head"):
            policy.values(observe())


def test_tokens_become_actions_by_hand(folder: Path) -> None:
    """Bin centres are (2b-257)/255; dimension 0 is half of it; dimension 2 is 0.5·(x+1) - 0.25."""
    decided = act(load(folder, **ALL))
    assert decided.tokens is not None
    bins = (32000 - decided.tokens).double()
    centres = ((2 * bins - 256) / 255).clamp(max=254 / 255)
    assert torch.allclose(decided.actions[..., 0].double(), 0.5 * centres[..., 0], atol=1e-6)
    assert torch.allclose(decided.actions[..., 2].double(), 0.5 * (centres[..., 2] + 1) - 0.25, atol=1e-6)
    assert torch.equal(decided.actions[..., 6] < 0, centres[..., 6] > 0.5)


def test_the_generator_alone_decides(folder: Path) -> None:
    policy = load(folder, **ALL)
    first = act(policy, seed=3).actions
    torch.manual_seed(5)
    assert torch.equal(act(policy, seed=3).actions, first)
    assert not torch.equal(act(policy, seed=4).actions, first)
    mode = act(policy, greedy=True).logprobs
    assert (act(policy, seed=4).logprobs <= mode + 1e-6).all()
    with pytest.raises(ValueError, match="greedy=True takes the mode"):
        act(policy, temperature=0.0)


@pytest.mark.parametrize("what", ["images", "state", "instructions"])
def test_every_input_matters(folder: Path, what: str) -> None:
    policy, obs = load(folder, **ALL), observe()
    other: dict[str, Any] = {
        "images": {**obs.images, "wrist": 255 - obs.images["wrist"]},
        "state": obs.state.flip(0),
        "instructions": ("close the drawer",) * 4,
    }
    before, after = (
        policy.act(x, greedy=True, temperature=1.0, generator=None).logprobs
        for x in (obs, dataclasses.replace(obs, **{what: other[what]}))
    )
    assert (before - after).abs().max() > 1e-3


def test_what_the_folder_has_decides(folder: Path, tmp_path: Path) -> None:
    assert load(folder).action_head is not None
    assert load(folder).proprio_projector is not None
    assert load(folder, action_head="discrete", use_proprio=False).proprio_projector is None
    write_checkpoint(tmp_path)
    plain = load(tmp_path)
    assert plain.action_head is None and plain.proprio_projector is None
    with pytest.raises(UserError, match=r"there is no action_head--latest_checkpoint\.pt and none of a step"):
        load(tmp_path, action_head="l1")


def test_the_l1_head_is_not_for_rl(folder: Path) -> None:
    policy = load(folder, **BOTH)
    with pytest.raises(UserError, match="deterministic, so there is nothing to sample"):
        act(policy)
    decided = act(policy, greedy=True)
    again = policy(decided.replay_inputs, temperature=1.0)
    assert decided.logprobs.abs().max() == 0
    assert again.logprobs.abs().max() < 1e-5 and again.entropy.abs().max() == 0
    with pytest.raises(RuntimeError, match="no distribution"):
        policy(decided.replay_inputs, temperature=1.0, with_distribution=True)


def test_the_log_probability_of_the_l1_head_is_minus_the_error(folder: Path) -> None:
    policy = load(folder, **BOTH)
    predicted = act(policy, greedy=True).replay_inputs["targets"]
    actions = torch.zeros(4, 3, 7)
    actions[..., 6] = 1.0
    inputs = policy.demonstration(observe(), actions)
    # Dimension 2 has bounds -0.25 and 0.75, so 0 is -0.5; a closed gripper is 0; the others' bounds are symmetric.
    target = torch.tensor([0.0, 0, -0.5, 0, 0, 0, 0])
    target[1] = 2 * 1.0 / 1.5 - 1  # bounds -1 and 0.5
    assert torch.allclose(inputs["targets"][0, 0], target, atol=1e-6)
    evaluation = policy(inputs, temperature=1.0)
    assert torch.allclose(evaluation.logprobs, -(predicted - target).abs(), atol=1e-5)


@pytest.mark.parametrize("head", ["discrete", "l1"])
def test_imitation(folder: Path, head: str) -> None:
    policy, obs = load(folder, chunks=1, **{**ALL, "action_head": head}), observe(2)
    actions = torch.rand(2, 1, 7, generator=torch.Generator().manual_seed(1)) * 0.18 - 0.09
    actions[..., 6] = torch.tensor([[1.0], [-1.0]])
    inputs = policy.demonstration(obs, actions)
    trained = [p for name, p in policy.named_parameters() if p.requires_grad and "embed_tokens" not in name]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    for _ in range(80):
        optimizer.zero_grad()
        (-policy(inputs, temperature=1.0).logprobs.mean()).backward()
        optimizer.step()
    decided = policy.act(obs, greedy=True, temperature=1.0, generator=None)
    assert (decided.actions - actions).abs().mean() < 0.03


def test_gradients_reach_all_that_is_trained(folder: Path) -> None:
    policy = load(folder, **ALL)
    evaluation = policy(act(policy).replay_inputs, temperature=1.0)
    assert evaluation.values is not None
    (evaluation.logprobs.square().mean() + evaluation.values.square().mean()).backward()
    silent = [n for n, p in policy.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert silent == []


def test_the_folder_is_written_back(folder: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    policy = load(folder, **BOTH)
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.out.weight)
    policy.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "action_head--latest_checkpoint.pt",
        "proprio_projector--latest_checkpoint.pt",
        "value_head.safetensors",
    }
    loaded = load(tmp_path, **BOTH)
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in policy.state_dict().items())
    first, second = act(policy, greedy=True), act(loaded, greedy=True)
    assert torch.equal(first.actions, second.actions)
    assert first.values is not None and second.values is not None and torch.equal(first.values, second.values)
    theirs = {name.removeprefix("network."): tensor for name, tensor in policy.state_dict().items()}
    assert all(torch.equal(theirs[name], tensor) for name, tensor in weights.items())
    action_level = r"value_head\.safetensors: .* out\.weight is \[1, 16\], expected \[3, 16\]"
    with pytest.raises(UserError, match=action_level):
        load(tmp_path, values=3, **BOTH)


def test_what_does_not_fit(folder: Path) -> None:
    def build(*, params: dict[str, Any] | None = None, path: str | None = str(folder), **fields: Any) -> None:
        build_policy("openvla_oft", spec(**fields), params or {}, path)

    with pytest.raises(UserError, match=r"has no fresh weights: set model\.path to a folder"):
        build(path=None)
    with pytest.raises(UserError, match="this env gives none"):
        build(image_shapes={})
    with pytest.raises(UserError, match=r"camera 'wrst' and the env gives agentview, wrist. Did you mean 'wrist'"):
        build(params={"cameras": ["wrst"]})
    with pytest.raises(UserError, match="expected at least one, each once"):
        build(params={"cameras": ["wrist", "wrist"]})
    with pytest.raises(UserError, match=r"are of 7 dimensions and the env's actions have 2"):
        build(action_dim=2)
    with pytest.raises(UserError, match=r"statistics are of 8 proprioceptive dimensions and the env's state has 4"):
        build(state_dim=4)
    with pytest.raises(UserError, match=r"got 'libero_goal', expected one of libero_10_no_noops"):
        build(params={"unnorm_key": "libero_goal"})
    with pytest.raises(UserError, match=r"num_images: no such key"):
        build(params={"num_images": 2})
    policy = load(folder)
    wrong = dataclasses.replace(observe(), images={"agentview": observe().images["wrist"]})
    with pytest.raises(ValueError, match=r"got images .*, expected 'agentview' of size \[40, 40\]"):
        policy.values(wrong)


def test_bfloat16(folder: Path) -> None:
    policy = load(folder, dtype="bfloat16", **ALL)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    decided = act(policy)
    assert decided.logprobs.dtype == decided.actions.dtype == torch.float32
    again = policy(decided.replay_inputs, temperature=1.6)
    assert (again.logprobs - decided.logprobs).abs().max() < 0.1


def test_a_tiny_folder(tmp_path: Path) -> None:
    OpenVlaOftPolicy.write_tiny(tmp_path / "plain")
    OpenVlaOftPolicy.write_tiny(tmp_path / "again")
    OpenVlaOftPolicy.write_tiny(tmp_path / "l1", with_l1_head=True)
    policy = build_policy("openvla_oft", spec(chunks=8), {"suite": "libero_goal"}, str(tmp_path / "plain"))
    assert sum(p.numel() for p in policy.parameters()) < 5e6
    decided = policy.act(observe(), greedy=False, temperature=1.0, generator=None)
    assert decided.actions.shape == (4, 8, 7)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert all((tmp_path / "plain" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    regression = build_policy("openvla_oft", spec(chunks=8), {"suite": "libero_10"}, str(tmp_path / "l1"))
    assert isinstance(regression, OpenVlaOftPolicy)
    assert regression.action_head is not None and regression.proprio_projector is not None
