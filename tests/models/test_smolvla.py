from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import read_config
from embodied_rl.models.flow.prefix import AfterPrefix
from embodied_rl.models.registry import build_policy
from embodied_rl.models.smolvla import SmolVlaNetwork, SmolVlaPolicy
from tests.models.flow.flow_models import N, decide, flow_policy, flow_spec, look

ROOT = "model.vlm_with_expert"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvla")
    SmolVlaPolicy.write_tiny(folder)
    return folder


def test_the_names_are_those_of_lerobot(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    vocabulary = shapes[f"{ROOT}.vlm.lm_head.weight"][0]
    for name, shape in {
        f"{ROOT}.vlm.model.text_model.embed_tokens.weight": (vocabulary, 64),
        f"{ROOT}.vlm.model.text_model.layers.1.self_attn.k_proj.weight": (32, 64),
        f"{ROOT}.vlm.model.text_model.norm.weight": (64,),
        f"{ROOT}.vlm.model.vision_model.embeddings.patch_embedding.weight": (64, 3, 8, 8),
        f"{ROOT}.vlm.model.vision_model.encoder.layers.0.self_attn.out_proj.bias": (64,),
        f"{ROOT}.vlm.model.vision_model.post_layernorm.weight": (64,),
        f"{ROOT}.vlm.model.connector.modality_projection.proj.weight": (64, 256),
        # Self-attention reads the expert's 48; cross-attention the language model's 2 heads of 16.
        f"{ROOT}.lm_expert.layers.0.self_attn.k_proj.weight": (32, 48),
        f"{ROOT}.lm_expert.layers.1.self_attn.k_proj.weight": (32, 32),
        f"{ROOT}.lm_expert.layers.1.self_attn.q_proj.weight": (64, 48),
        f"{ROOT}.lm_expert.layers.1.mlp.gate_proj.weight": (256, 48),
        f"{ROOT}.lm_expert.norm.weight": (48,),
        "model.state_proj.weight": (64, 32),
        "model.action_in_proj.weight": (48, 32),
        "model.action_out_proj.weight": (32, 48),
        "model.action_time_mlp_in.weight": (48, 96),
        "model.action_time_mlp_out.bias": (48,),
    }.items():
        assert shapes[name] == shape, name
    assert not any("lm_expert.embed_tokens" in name for name in shapes)


def test_the_published_sizes_are_known(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= {"num_vlm_layers": 16, "resize_imgs_with_padding": [512, 512]}
    with torch.device("meta"):
        network = SmolVlaNetwork(SmolVlaPolicy.network_config(config, "somewhere"))
    layer = network.get_submodule("vlm_with_expert.lm_expert.layers.1")
    assert layer.get_parameter("self_attn.q_proj.weight").shape == (960, 720)
    assert layer.get_parameter("self_attn.k_proj.weight").shape == (320, 320)
    assert layer.get_parameter("mlp.gate_proj.weight").shape == (2048, 720)
    assert 0.38e9 < sum(p.numel() for p in network.parameters()) < 0.45e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mode": "self_attn"}, "attention_mode='self_attn', expected 'cross_attn'"),
        ({"add_image_special_tokens": True}, "add_image_special_tokens=True, expected False"),
        ({"num_expert_layers": 1}, "num_expert_layers=1 and num_vlm_layers=2, expected as many"),
        ({"resize_imgs_with_padding": None}, "no resize_imgs_with_padding"),
        ({"architecture": None, "vlm_model_name": "other/vlm"}, "vlm_model_name='other/vlm', expected"),
    ],
)
def test_variants_that_are_not_done_are_refused(tiny: Path, change: dict[str, object], message: str) -> None:
    config = read_config(tiny) | change
    with pytest.raises(UserError, match=message):
        SmolVlaPolicy.network_config(config, "somewhere")


def test_old_folders_keep_their_statistics_with_the_weights(tiny: Path, tmp_path: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    # One table for words and output layer: only one of the names is in the file.
    del weights[f"{ROOT}.vlm.model.text_model.embed_tokens.weight"]
    statistics = load_file(tiny / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    for name, tensor in statistics.items():
        feature, _, kind = name.rpartition(".")
        where = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
        weights[f"{where}.buffer_{feature.replace('.', '_')}.{kind}"] = tensor
    save_file(weights, tmp_path / "model.safetensors")
    for file in ("config.json", "architecture.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny / file).read_bytes())
    new, old = (build_policy("smolvla", flow_spec(0), {}, str(path)) for path in (tiny, tmp_path))
    assert isinstance(new, SmolVlaPolicy)
    assert isinstance(old, SmolVlaPolicy)
    assert torch.equal(decide(new, look()).actions, decide(old, look()).actions)


def test_later_actions_do_not_change_earlier_ones(tiny: Path) -> None:
    """The expert's self-attention is causal; the state's token is seen by no picture and no word."""
    policy = flow_policy("smolvla", tiny)
    inputs = policy._inputs(look())
    noise = torch.randn(N, 16, 32, generator=torch.Generator().manual_seed(0))
    other = noise.clone()
    other[:, 9:] += 1.0
    t = torch.full((N,), 0.5)
    with torch.no_grad():
        of = policy._velocity_of(policy._prefix(inputs))
        one, two = of(noise, t)[0], of(other, t)[0]
        assert torch.equal(one[:, :9], two[:, :9])
        assert not torch.allclose(one[:, 9], two[:, 9])
        moved = policy._prefix({**inputs, "state": inputs["state"] + 1.0})
        plain = policy._prefix(inputs)
        for layer, (key, _) in plain.cache.layers.items():
            assert torch.equal(key[:, :, :-1], moved.cache.layers[layer][0][:, :, :-1])
            assert not torch.allclose(key[:, :, -1], moved.cache.layers[layer][0][:, :, -1])


def test_cross_attention_is_that_of_its_definition(tiny: Path) -> None:
    """Head by head, in float64: queries turned by their place among the actions, keys projected from the prefix's."""
    policy = flow_policy("smolvla", tiny)
    assert isinstance(policy, SmolVlaPolicy)
    layer = policy.model.get_submodule("vlm_with_expert.lm_expert.layers.1.self_attn").double()
    prefix = policy._prefix(policy._inputs(look()))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, 5, 48, generator=generator, dtype=torch.float64)
    seen = prefix.seen
    key, value = (tensor.double() for tensor in prefix.cache.layers[1])
    prefix.cache.layers[1] = (key, value)
    angle = torch.arange(5.0, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    cos, sin = (torch.cat((part, part), 1).expand(N, -1, -1) for part in (angle.cos(), angle.sin()))
    with torch.no_grad():
        output, _ = layer(
            hidden,
            attention_mask=seen[:, None].expand(-1, 5, -1)[:, None],
            past_key_values=AfterPrefix(prefix.cache),
            position_embeddings=(cos, sin),
        )

        def project(name: str, x: Tensor) -> Tensor:
            return functional.linear(x, layer.get_parameter(f"{name}.weight"))

        queries = project("q_proj", hidden).unflatten(-1, (4, 16))
        flat_key, flat_value = (t.transpose(1, 2).reshape(N, -1, 32) for t in (key, value))
        keys, values = (
            project(f"{name}_proj", t).unflatten(-1, (2, 16)) for name, t in (("k", flat_key), ("v", flat_value))
        )
        heads = []
        for head in range(4):
            q = queries[:, :, head]
            first, second = q[..., :8], q[..., 8:]
            turned = torch.cat(
                (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
            )
            scores = turned @ keys[:, :, head // 2].transpose(1, 2) / math.sqrt(16)
            scores = scores.masked_fill(~seen[:, None], -math.inf)
            heads.append(scores.softmax(-1) @ values[:, :, head // 2])
        expected = project("o_proj", torch.cat(heads, -1))
    assert torch.allclose(output, expected, atol=1e-9)
