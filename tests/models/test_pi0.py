from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PI0ForConditionalGeneration

from embodied_rl.errors import UserError
from embodied_rl.models.flow.lerobot_folder import features
from embodied_rl.models.flow.prefix import resize_with_padding
from embodied_rl.models.pi0 import Pi0Policy, lerobot_config
from embodied_rl.models.registry import build_policy
from tests.models.flow.flow_models import A, N, S, decide, flow_policy, flow_spec, look


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pi0")
    Pi0Policy.write_tiny(folder)
    return folder


def published_weights() -> dict[str, Tensor]:
    """Names and shapes as lerobot publishes them, spelled out once more: width 32, one layer each."""
    shapes: dict[str, tuple[int, ...]] = {}
    root = "model.paligemma_with_expert"
    vision = f"{root}.paligemma.model.vision_tower.vision_model"
    for name, shape in {
        "embeddings.patch_embedding.weight": (32, 3, 14, 14),
        "embeddings.patch_embedding.bias": (32,),
        "embeddings.position_embedding.weight": (4, 32),
        "post_layernorm.weight": (32,),
        "post_layernorm.bias": (32,),
    }.items():
        shapes[f"{vision}.{name}"] = shape
    layer = f"{vision}.encoder.layers.0"
    for part, (rows, columns) in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32),
        "self_attn.out_proj": (32, 32),
        "mlp.fc1": (64, 32),
        "mlp.fc2": (32, 64),
    }.items():
        shapes |= {f"{layer}.{part}.weight": (rows, columns), f"{layer}.{part}.bias": (rows,)}
    for norm in ("layer_norm1", "layer_norm2"):
        shapes |= {f"{layer}.{norm}.weight": (32,), f"{layer}.{norm}.bias": (32,)}
    projector = f"{root}.paligemma.model.multi_modal_projector.linear"
    shapes |= {f"{projector}.weight": (32, 32), f"{projector}.bias": (32,)}
    for tower, width, inner in (("paligemma.model.language_model", 32, 64), ("gemma_expert.model", 24, 48)):
        layer = f"{root}.{tower}.layers.0"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (32, width),
            f"{layer}.self_attn.k_proj.weight": (16, width),
            f"{layer}.self_attn.v_proj.weight": (16, width),
            f"{layer}.self_attn.o_proj.weight": (width, 32),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
            f"{root}.{tower}.norm.weight": (width,),
        }
    shapes |= {f"{root}.paligemma.lm_head.weight": (400, 32), f"{root}.gemma_expert.lm_head.weight": (400, 24)}
    for name, (rows, columns) in {
        "state_proj": (24, 32),
        "action_in_proj": (24, 32),
        "action_out_proj": (32, 24),
        "action_time_mlp_in": (24, 48),
        "action_time_mlp_out": (24, 24),
    }.items():
        shapes |= {f"model.{name}.weight": (rows, columns), f"model.{name}.bias": (rows,)}
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def published(tmp_path: Path, tiny: Path) -> Path:
    """A folder that this project's code did not write, but for the tokenizer."""
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    visual = {"type": "VISUAL", "shape": [3, 256, 256]}
    config = {
        "type": "pi0",
        "input_features": {
            "observation.images.image": visual,
            "observation.images.image2": visual,
            "observation.images.empty_camera_0": visual,
            "observation.state": {"type": "STATE", "shape": [8]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "chunk_size": 6,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "image_resolution": [28, 28],
        "num_inference_steps": 10,
        "architecture": {
            "paligemma": {"hidden_size": 32, "intermediate_size": 64, **heads},
            "expert": {"hidden_size": 24, "intermediate_size": 48, **heads},
            "vision": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "vocab_size": 400,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(published_weights(), tmp_path / "model.safetensors")
    statistics = {
        "observation.state.mean": torch.arange(8.0),
        "observation.state.std": torch.full((8,), 2.0),
        "action.mean": torch.full((7,), 0.1),
        "action.std": torch.full((7,), 0.5),
    }
    modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    for name, kind, index in (("pre", "normalizer", 1), ("post", "unnormalizer", 0)):
        state = f"policy_{name}processor_step_{index}_{kind}_processor.safetensors"
        save_file(statistics, tmp_path / state)
        steps: list[dict[str, Any]] = [
            {"registry_name": f"{kind}_processor", "config": {"norm_map": modes}, "state_file": state}
        ]
        if name == "pre":
            steps.insert(0, {"registry_name": "tokenizer_processor", "config": {"max_length": 40}})
        (tmp_path / f"policy_{name}processor.json").write_text(json.dumps({"name": name, "steps": steps}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny / file).read_bytes())
    return tmp_path


def build(path: Path, **params: Any) -> Pi0Policy:
    policy = build_policy("pi0", flow_spec(), {"num_steps": 3, **params}, str(path))
    assert isinstance(policy, Pi0Policy)
    return policy


def test_a_published_folder_is_read_whole(published: Path) -> None:
    """Every weight has a place, and every parameter a weight: else it is refused."""
    policy, weights = build(published), published_weights()
    own = dict(policy.model.named_parameters())
    root = "model.paligemma_with_expert"
    assert len(own) == len(weights) - 1  # but for the expert's output layer, which nothing uses
    for ours, theirs in {
        "model.vlm.language_model.embed_tokens.weight": f"{root}.paligemma.lm_head.weight",
        "model.dit.layers.0.mlp.up_proj.weight": f"{root}.gemma_expert.model.layers.0.mlp.up_proj.weight",
        "embed_action_time.state_proj.bias": "model.state_proj.bias",
        "action_out_proj.weight": "model.action_out_proj.weight",
    }.items():
        assert torch.equal(own[ours], weights[theirs])
    assert policy.cameras == {"image": "agentview", "image2": "wrist", "empty_camera_0": None}
    assert policy.folder.max_prompt_length == 40
    assert policy.horizon == 6
    decided = decide(policy, look())
    assert torch.isfinite(decided.logprobs).all()

    policy.save_pretrained(published / "again")
    again = load_file(published / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    unused = f"{root}.gemma_expert.lm_head.weight"
    assert all(torch.equal(again[name], weights[name]) for name in weights if name != unused)
    assert again[unused].shape == weights[unused].shape


def test_a_missing_weight_and_a_surplus_one_are_named(published: Path) -> None:
    weights = published_weights()
    moved = weights.pop("model.state_proj.bias")
    save_file({**weights, "model.statue_proj.bias": moved}, published / "model.safetensors")
    with pytest.raises(UserError, match=r"state_proj.bias is missing; model.statue_proj.bias is unexpected"):
        build(published)


def test_an_untied_output_layer_is_refused(published: Path) -> None:
    weights = published_weights()
    head = weights["model.paligemma_with_expert.paligemma.lm_head.weight"]
    words = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    save_file({**weights, words: head.clone()}, published / "model.safetensors")
    build(published)
    save_file({**weights, words: head + 0.1}, published / "model.safetensors")
    with pytest.raises(UserError, match="lm_head and embed_tokens differ"):
        build(published)


def native(policy: Pi0Policy) -> PI0ForConditionalGeneration:
    """transformers' class with the same weights, and its own forward pass."""
    config = Pi0Policy.network_config(policy.folder.config, policy.folder.path)
    config.vlm_config.image_token_id = config.vlm_config.text_config.vocab_size
    model = PI0ForConditionalGeneration(config).eval()
    model.load_state_dict(policy.model.state_dict(), strict=False)
    return model


def test_the_velocity_is_that_of_transformers(tiny: Path) -> None:
    policy, obs = flow_policy("pi0", tiny), look()
    assert isinstance(policy, Pi0Policy)
    model, inputs = native(policy), decide(policy, obs).replay_inputs
    size = policy.image_size
    pixels = torch.stack([resize_with_padding(obs.images[name], size, centered=True) for name in SIZES_IN_ORDER], 1)
    patches = (size[0] // 14) ** 2
    vlm_config: Any = model.config.vlm_config
    pictures = torch.full((N, 2 * patches), vlm_config.image_token_id)
    seen = inputs["tokens"] >= 0
    noise = torch.randn(N, 16, 32, generator=torch.Generator().manual_seed(1))
    t = torch.tensor([1.0, 0.7, 0.4, 0.1])
    state = (obs.state - policy.folder.statistics["observation.state.mean"]) / policy.folder.statistics[
        "observation.state.std"
    ]
    with torch.no_grad():
        ours, _ = policy._velocity_of(policy._prefix(inputs))(noise, t)
        theirs = model(
            state=torch.nn.functional.pad(state, (0, 32 - S)),
            noise=noise,
            timestep=t,
            input_ids=torch.cat((pictures, inputs["tokens"].clamp(min=0)), 1),
            attention_mask=torch.cat((torch.ones_like(pictures), seen.long()), 1),
            pixel_values=pixels,
            pixel_attention_mask=torch.ones(N, 2, dtype=torch.bool),
        ).logits
    assert theirs.abs().mean() > 0.1
    assert torch.allclose(ours, theirs, atol=1e-4)


SIZES_IN_ORDER = ("agentview", "wrist")


def test_a_folder_of_transformers_is_read(tiny: Path, tmp_path: Path) -> None:
    policy = flow_policy("pi0", tiny)
    assert isinstance(policy, Pi0Policy)
    native(policy).save_pretrained(tmp_path)
    policy.folder.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="statistics mean and std are missing"):
        build(tmp_path)
    statistics = policy.folder.statistics
    saved = {
        f"{new}_{kind}": statistics[f"{old}.{kind}"].tolist()
        for new, old in (("state", "observation.state"), ("actions", "action"))
        for kind in ("mean", "std")
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    again = build(tmp_path)
    assert torch.allclose(decide(again, look()).actions, decide(policy, look()).actions, atol=1e-6)


def test_the_published_sizes_are_read_without_more(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= {"image_resolution": [224, 224], "chunk_size": 50}
    sizes = Pi0Policy.network_config(config, "somewhere")
    with torch.device("meta"):
        model = PI0ForConditionalGeneration(sizes)
    count = sum(p.numel() for p in model.parameters())
    assert 3.2e9 < count < 3.4e9
    assert lerobot_config(sizes, features({"image": 256}, S, A)).get("architecture") is None
    with pytest.raises(UserError, match="paligemma_variant='gemma_9b', expected one of gemma_2b, gemma_300m"):
        Pi0Policy.network_config({**config, "paligemma_variant": "gemma_9b"}, "somewhere")


def test_prompts_end_with_a_new_line_and_start_with_the_start_token(tiny: Path) -> None:
    policy = flow_policy("pi0", tiny)
    tokens = policy._inputs(look())["tokens"]
    said = tokens[0][tokens[0] >= 0].tolist()
    assert policy.folder.tokenizer.convert_ids_to_tokens(said[0]) == "<bos>"
    assert policy.folder.tokenizer.decode(said, skip_special_tokens=True) == "open the drawer\n"
