from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import TINY_QUANTILES, prompt_tokens
from embodied_rl.models.flow.prefix import resize_with_padding
from embodied_rl.models.pi05 import AdaptiveLayer, AdaptiveNorm, Pi05Policy, prompt, state_bins
from embodied_rl.models.registry import build_policy
from tests.models import test_pi0
from tests.models.flow.flow_models import A, C, N, S, decide, flow_policy, flow_spec, look

EXPERT = "model.paligemma_with_expert.gemma_expert.model"
WORDS = "model.paligemma_with_expert.paligemma.model.language_model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pi05")
    Pi05Policy.write_tiny(folder)
    return folder


def published_weights() -> dict[str, Tensor]:
    """Names and shapes as lerobot publishes them: those of π0, but for the state, the time and the expert's norms."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor
        for name, tensor in test_pi0.published_weights().items()
        if not name.startswith(("model.state_proj.", "model.action_time_mlp_"))
        and not (name.startswith(EXPERT) and "norm" in name)
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        shapes |= {f"{EXPERT}.{norm}.dense.weight": (72, 24), f"{EXPERT}.{norm}.dense.bias": (72,)}
    for part in ("in", "out"):
        shapes |= {f"model.time_mlp_{part}.weight": (24, 24), f"model.time_mlp_{part}.bias": (24,)}
    return weights | {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


STATISTICS = {
    "observation.state.q01": -2.0 * torch.ones(8),
    "observation.state.q99": 2.0 + 4.0 * torch.arange(8.0),
    "action.q01": torch.full((7,), -0.5),
    "action.q99": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.0, -0.5]),
}


@pytest.fixture
def published(tmp_path: Path, tiny: Path) -> Path:
    """A folder as lerobot 0.6 writes it, which this project's code did not write, but for the tokenizer."""
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    visual = {"type": "VISUAL", "shape": [3, 256, 256]}
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    inputs = {f"observation.images.{name}": visual for name in ("image", "image2", "empty_camera_0")}
    config = {
        "type": "pi05",
        "input_features": {**inputs, "observation.state": {"type": "STATE", "shape": [8]}},
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "normalization_mapping": modes,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "chunk_size": 6,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "image_resolution": [28, 28],
        "tokenizer_max_length": 200,
        "use_relative_actions": False,
        "architecture": {
            "paligemma": {"hidden_size": 32, "intermediate_size": 64, **heads},
            "expert": {"hidden_size": 24, "intermediate_size": 48, **heads},
            "vision": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            "vocab_size": 400,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(published_weights(), tmp_path / "model.safetensors")
    before, after = (
        f"policy_{name}processor_step_{index}_{kind}_processor.safetensors"
        for name, index, kind in (("pre", 3, "normalizer"), ("post", 0, "unnormalizer"))
    )
    save_file(STATISTICS, tmp_path / before)
    save_file(STATISTICS, tmp_path / after)
    steps: dict[str, list[dict[str, Any]]] = {
        "policy_preprocessor": [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {"registry_name": "relative_actions_processor", "config": {"enabled": False, "exclude_joints": []}},
            {"registry_name": "normalizer_processor", "config": {"norm_map": modes}, "state_file": before},
            {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
            {"registry_name": "tokenizer_processor", "config": {"max_length": 180}},
        ],
        "policy_postprocessor": [
            {"registry_name": "unnormalizer_processor", "config": {"norm_map": modes}, "state_file": after},
            {"registry_name": "absolute_actions_processor", "config": {"enabled": False}},
        ],
    }
    for name, parts in steps.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "steps": parts}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny / file).read_bytes())
    return tmp_path


def build(path: Path, **params: Any) -> Pi05Policy:
    policy = build_policy("pi05", flow_spec(), {"num_steps": 3, **params}, str(path))
    assert isinstance(policy, Pi05Policy)
    return policy


def test_a_published_folder_is_read_whole(published: Path) -> None:
    policy, weights = build(published), published_weights()
    own = dict(policy.model.named_parameters())
    assert len(own) == len(weights) - 1  # but for the expert's output layer, which nothing uses
    for ours, theirs in {
        "model.vlm.language_model.norm.weight": f"{WORDS}.norm.weight",
        "model.dit.layers.0.input_layernorm.dense.weight": f"{EXPERT}.layers.0.input_layernorm.dense.weight",
        "model.dit.norm.dense.bias": f"{EXPERT}.norm.dense.bias",
        "embed_action_time.time_mlp_in.weight": "model.time_mlp_in.weight",
        "embed_action_time.action_in_proj.bias": "model.action_in_proj.bias",
        "action_out_proj.weight": "model.action_out_proj.weight",
    }.items():
        assert torch.equal(own[ours], weights[theirs])
    assert policy.cameras == {"image": "agentview", "image2": "wrist", "empty_camera_0": None}
    assert policy.folder.max_prompt_length == 180
    decided = decide(policy, look())
    assert torch.isfinite(decided.logprobs).all()

    policy.save_pretrained(published / "again")
    again = load_file(published / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    unused = "model.paligemma_with_expert.gemma_expert.lm_head.weight"
    assert all(torch.equal(again[name], weights[name]) for name in weights if name != unused)
    assert again[unused].shape == weights[unused].shape
    assert torch.equal(decide(build(published / "again"), look()).actions, decided.actions)
    steps = json.loads((published / "again/policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps][2:5] == [
        "normalizer_processor",  # before the state is written into the prompt
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
    ]


def test_older_names_of_weights_are_read(published: Path) -> None:
    """Of openpi's conversion: no ``model.``, and π0's name of the time's layers."""
    expected = decide(build(published), look()).actions
    weights = {
        name.removeprefix("model.").replace("time_mlp_", "action_time_mlp_"): tensor
        for name, tensor in published_weights().items()
    }
    save_file(weights, published / "model.safetensors")
    assert torch.equal(decide(build(published), look()).actions, expected)


def test_weights_of_pi0_are_refused(published: Path) -> None:
    save_file(test_pi0.published_weights(), published / "model.safetensors")
    with pytest.raises(UserError, match=r"input_layernorm\.dense\.bias is missing"):
        build(published)


@pytest.mark.parametrize("key", ["use_relative_actions", "use_visual_memory", "use_proprioceptive_memory"])
def test_settings_that_are_not_done_here_are_refused(published: Path, key: str) -> None:
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, key: True}))
    with pytest.raises(UserError, match=f"config.json has {key}=True, expected false"):
        build(published)


@pytest.mark.parametrize("file", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_relative_actions_are_refused(published: Path, file: str) -> None:
    text = (published / file).read_text()
    (published / file).write_text(text.replace('"enabled": false', '"enabled": true'))
    with pytest.raises(UserError, match=rf"{file} has '(relative|absolute)_actions_processor' enabled"):
        build(published)


def test_state_bins_by_hand() -> None:
    """256 of width 1/128, counted from -1; 255 beyond the last, -1 below the first."""
    state = torch.tensor([-3.0, -1.0, -0.993, -0.992, 0.0, 0.0078, 0.0079, 0.9921, 1.0, 3.0])
    assert state_bins(state).tolist() == [-1, 0, 0, 1, 128, 128, 129, 254, 255, 255]
    edges = np.linspace(-1, 1, 257)[:-1]
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(0))
    for states in (drawn, torch.from_numpy(edges).float(), torch.from_numpy(edges).float() - 1e-7):
        assert state_bins(states).tolist() == (np.digitize(states.numpy(), edges) - 1).tolist()


def test_prompts_by_hand(published: Path) -> None:
    obs = look(1)
    # Between -2 and 2 + 4i: the lower end, the upper, the middle, below, above, a quarter, the rest at the lower end.
    obs.state[0] = torch.tensor([-2.0, 6.0, 4.0, -2.1, 99.0, 4.0, -2.0, -2.0])
    numbers = "0 255 128 -1 255 64 0 0"
    assert build(published).prompts(obs) == [f"Task: open the drawer, State: {numbers};\nAction: "]
    padded = f"Task: open the drawer, State: {numbers}{' 128' * 24};\nAction: "
    assert build(published, padded_state=True).prompts(obs) == [padded]
    assert prompt(" open_the\ndrawer\n", [7]) == "Task: open the drawer, State: 7;\nAction: "


def test_an_instruction_must_leave_room_for_the_longest_state(published: Path) -> None:
    policy, obs = build(published), look(1)
    obs.state[0] = STATISTICS["observation.state.q01"]  # eight times 0
    [text] = policy.prompts(obs)
    policy.folder = replace(policy.folder, max_prompt_length=len(prompt_tokens(policy.folder, text)) + 15)
    with pytest.raises(UserError, match=r"State: 255 255 255 255 255 255 255 255;.*tokens and the policy takes"):
        policy.prompts(obs)
    policy.folder = replace(policy.folder, max_prompt_length=policy.folder.max_prompt_length + 1)
    policy.prompts(obs)


@pytest.mark.parametrize("padded", [False, True])
def test_the_network_reads_the_prompt_and_no_other_state(tiny: Path, padded: bool) -> None:
    policy, obs = flow_policy("pi05", tiny, padded_state=padded), look()
    decided = decide(policy, obs)
    tokens = decided.replay_inputs["tokens"]
    assert tokens.shape == (N, 200)
    for row, text in enumerate(policy.prompts(obs)):
        said = tokens[row][tokens[row] >= 0].tolist()
        assert policy.folder.tokenizer.convert_ids_to_tokens(said[0]) == "<bos>"
        assert policy.folder.tokenizer.decode(said, skip_special_tokens=True) == text
    other = {**decided.replay_inputs, "state": decided.replay_inputs["state"] + 1.0}
    assert torch.equal(policy(other, temperature=1.0).logprobs, policy(decided.replay_inputs, temperature=1.0).logprobs)


def test_quantile_normalisation_by_hand(published: Path) -> None:
    """q01 becomes -1, q99 becomes 1; where both are one number, that is -1."""
    policy = build(published)
    actions = torch.zeros(1, C, A)
    actions[0, 0] = torch.tensor([-0.5, 0.5, 0.0, 0.25, -0.75, -0.25, -0.5])
    normalized = policy._from_env(actions)
    assert normalized.shape == (1, C, 32)
    assert normalized[0, 0, :A].tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.5, -1.5, 0.0, -1.0])
    assert not normalized[..., A:].any()
    assert torch.allclose(policy._to_env(normalized)[0, 0], actions[0, 0], atol=1e-6)
    assert policy._to_env(torch.full((1, 6, 32), 9.0)).max() <= 1.0
    state = torch.stack([STATISTICS["observation.state.q01"], STATISTICS["observation.state.q99"]])
    expected = torch.tensor([[-1.0], [1.0]]).expand(2, S)
    assert torch.allclose(policy.state_normalizer.normalize(state), expected)


def test_the_tiny_folder_is_normalised_by_quantiles(tiny: Path) -> None:
    policy = build(tiny)
    assert policy.folder.modes == {"STATE": "QUANTILES", "ACTION": "QUANTILES"}
    assert policy.folder.statistics.keys() == TINY_QUANTILES.keys()
    for name in ("observation.state", "action"):
        assert (policy.folder.statistics[f"{name}.q01"] < policy.folder.statistics[f"{name}.q99"]).all()


def test_adaptive_norm_by_hand() -> None:
    """x = (3, 4) has the root mean square √12.5; a condition of 2 gives scale (1, 3), shift (5, 7), gate (9, 11)."""
    norm = AdaptiveNorm(2, 0.0)
    with torch.no_grad():
        norm.dense.weight.copy_(torch.tensor([[0.5, 0.0]] * 6))
        norm.dense.bias.copy_(torch.tensor([0.0, 2.0, 4.0, 6.0, 8.0, 10.0]))
        output, gate = norm(torch.tensor([[[3.0, 4.0]], [[6.0, 8.0]]]), torch.tensor([[2.0, 100.0]] * 2))
    root = math.sqrt(12.5)
    for row in range(2):
        assert output[row, 0].tolist() == pytest.approx([2 * 3 / root + 5, 4 * 4 / root + 7])
        assert gate[row, 0].tolist() == [9.0, 11.0]


def test_a_closed_gate_leaves_the_input(tiny: Path) -> None:
    policy = flow_policy("pi05", tiny)
    layer: AdaptiveLayer = policy.model.model.dit.layers[0]
    x, condition = torch.randn(2, 5, 48), torch.randn(2, 48)
    positions = policy.model.model.dit.rotary_emb(x, position_ids=torch.arange(5)[None])
    given = {"condition": condition, "attention_mask": None, "position_embeddings": positions}
    with torch.no_grad():
        assert not torch.allclose(layer(x, **given), x, atol=0.1)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.dense.weight[96:].zero_()
            norm.dense.bias[96:].zero_()
        assert torch.equal(layer(x, **given), x)


class Reference:
    """The expert once more, by lerobot's names, in float64: openpi's formulas without any of its or our modules."""

    def __init__(self, policy: Pi05Policy) -> None:
        self.weights = {n: t.detach().double() for n, t in policy.published_weights(policy.model.state_dict()).items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        modulation = self.linear(f"{name}.dense", condition)[:, None]
        normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        scale, shift, gate = modulation[..., :width], modulation[..., width : 2 * width], modulation[..., 2 * width :]
        return normed * (1 + scale) + shift, gate

    def attention(self, name: str, x: Tensor, prefix: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Four heads of 16 with one of keys and values; all look at what is seen of the prefix and at each other."""

        def turn(y: Tensor) -> Tensor:
            frequency = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
            angle = (seen.sum(1)[:, None, None] + torch.arange(x.shape[1])[None, :, None]) * frequency
            first, second = y[..., :8], y[..., 8:]
            return torch.cat(
                (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
            )

        keys = torch.cat((prefix[0][:, 0].double(), turn(self.linear(f"{name}.k_proj", x))), 1)
        values = torch.cat((prefix[1][:, 0].double(), self.linear(f"{name}.v_proj", x)), 1)
        hidden = torch.cat((~seen, torch.zeros(x.shape[:2], dtype=torch.bool)), 1)[:, None]
        queries = self.linear(f"{name}.q_proj", x).unflatten(-1, (4, 16))
        heads = []
        for head in range(4):
            scores = turn(queries[:, :, head]) @ keys.transpose(1, 2) / 4.0
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ values)
        return self.linear(f"{name}.o_proj", torch.cat(heads, -1))

    def velocity(self, noise: Tensor, t: Tensor, prefix: list[tuple[Tensor, Tensor]], seen: Tensor) -> Tensor:
        period = 0.004 * 1000.0 ** torch.linspace(0, 1, 24, dtype=torch.float64)
        angle = 2 * math.pi * t.double()[:, None] / period
        condition = torch.cat((angle.sin(), angle.cos()), 1)
        for part in ("in", "out"):
            condition = functional.silu(self.linear(f"model.time_mlp_{part}", condition))
        x = self.linear("model.action_in_proj", noise.double())
        for index, cache in enumerate(prefix):
            name = f"{EXPERT}.layers.{index}"
            y, gate = self.norm(f"{name}.input_layernorm", x, condition)
            x = x + gate * self.attention(f"{name}.self_attn", y, cache, seen)
            y, gate = self.norm(f"{name}.post_attention_layernorm", x, condition)
            inner = functional.gelu(self.linear(f"{name}.mlp.gate_proj", y), approximate="tanh")
            x = x + gate * self.linear(f"{name}.mlp.down_proj", inner * self.linear(f"{name}.mlp.up_proj", y))
        return self.linear("model.action_out_proj", self.norm(f"{EXPERT}.norm", x, condition)[0])


def test_the_velocity_is_that_of_the_formulas(tiny: Path) -> None:
    """Behind transformers' own forward pass of PaliGemma."""
    policy, obs = flow_policy("pi05", tiny), look()
    assert isinstance(policy, Pi05Policy)
    inputs = decide(policy, obs).replay_inputs
    network: Any = policy.model.model
    size = policy.image_size
    pixels = torch.stack(
        [resize_with_padding(obs.images[name], size, centered=True) for name in test_pi0.SIZES_IN_ORDER], 1
    )
    pictures = torch.full((N, 2 * (size[0] // 14) ** 2), network.config.vlm_config.image_token_id)
    seen = torch.cat((torch.ones_like(pictures, dtype=torch.bool), inputs["tokens"] >= 0), 1)
    ids = torch.cat((pictures, inputs["tokens"].clamp(min=0)), 1)
    noise = torch.randn(N, 16, 32, generator=torch.Generator().manual_seed(1))
    t = torch.tensor([1.0, 0.7, 0.4, 0.1])
    with torch.no_grad():
        ours, _ = policy._velocity_of(policy._prefix(inputs))(noise, t)
        cache = network.vlm(
            inputs_embeds=network.embed_prefix(ids, pixels, torch.ones(N, 2, dtype=torch.bool)),
            attention_mask=seen.long(),
            position_ids=seen.long().cumsum(1) - 1,
            token_type_ids=torch.zeros_like(ids),
            use_cache=True,
        ).past_key_values
        prefix = [(layer.keys, layer.values) for layer in cache.layers]
        expected = Reference(policy).velocity(noise, t, prefix, seen)
    assert expected.abs().mean() > 0.1
    assert torch.allclose(ours.double(), expected, atol=2e-5)


def test_the_published_sizes_are_read_without_more(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= {"image_resolution": [224, 224], "chunk_size": 50}
    with torch.device("meta"):
        model = Pi05Policy.build_network(Pi05Policy.network_config(config, "somewhere"))
    # Of π0: 18 layers with two norms and the last, without their 37 scales; time instead of time and action; no state.
    norms = 37 * (1024 * 3072 + 3072 - 1024)
    with torch.device("meta"):
        pi0 = test_pi0.Pi0Policy.build_network(
            test_pi0.Pi0Policy.network_config({**config, "type": "pi0"}, "somewhere")
        )
    less = 1024 * 1024 + (32 + 1) * 1024
    count, other = (sum(p.numel() for p in network.parameters()) for network in (model, pi0))
    assert count == other + norms - less
    assert 3.3e9 < count < 3.4e9
