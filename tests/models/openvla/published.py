"""The published checkpoints' layout and arithmetic, written down apart from the code under test."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicySpec

WORDS = (
    *("In:", "What", "action", "should", "the", "robot", "take", "to", "Out:", "open", "close", "pick", "up", "put"),
    *("drawer", "bowl", "red", "blue", "on", "plate", "and", "place", "it", "in", "basket", "?"),
)
ACTION = {
    "q01": [-0.5, -1.0, -0.25, -0.1, -0.2, -0.3, 0.0],
    "q99": [0.5, 0.5, 0.75, 0.1, 0.2, 0.3, 1.0],
    "mask": [True] * 6 + [False],
}
PROPRIO = {"q01": [-1.0] * 8, "q99": [1.0, 3.0] + [1.0] * 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vit:
    width: int
    depth: int
    mlp: int
    heads: int
    dino: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    dino: Vit
    siglip: Vit
    names: tuple[str, str]
    image: int
    hidden: int
    intermediate: int
    layers: int
    heads: int


FULL = Sizes(
    dino=Vit(width=1024, depth=24, mlp=4096, heads=16, dino=True),
    siglip=Vit(width=1152, depth=27, mlp=4304, heads=16, dino=False),
    names=("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"),
    image=224,
    hidden=4096,
    intermediate=11008,
    layers=32,
    heads=32,
)
SMALL = Sizes(
    dino=Vit(width=32, depth=3, mlp=64, heads=2, dino=True),
    siglip=Vit(width=32, depth=3, mlp=64, heads=2, dino=False),
    names=("vit_tiny_test_dinov2", "vit_tiny_test_siglip"),
    image=28,
    hidden=32,
    intermediate=48,
    layers=2,
    heads=2,
)


def layout(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, fan_in: int, fan_out: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (fan_out, fan_in)
        if bias:
            shapes[f"{name}.bias"] = (fan_out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    for prefix, vit in (("featurizer", sizes.dino), ("fused_featurizer", sizes.siglip)):
        root, width = f"vision_backbone.{prefix}", vit.width
        if vit.dino:
            shapes[f"{root}.cls_token"] = (1, 1, width)
            shapes[f"{root}.reg_token"] = (1, 4, width)
        shapes[f"{root}.pos_embed"] = (1, (sizes.image // 14) ** 2, width)
        shapes[f"{root}.patch_embed.proj.weight"] = (width, 3, 14, 14)
        shapes[f"{root}.patch_embed.proj.bias"] = (width,)
        for index in range(vit.depth):
            block = f"{root}.blocks.{index}"
            norm(f"{block}.norm1", width)
            norm(f"{block}.norm2", width)
            linear(f"{block}.attn.qkv", width, 3 * width)
            linear(f"{block}.attn.proj", width, width)
            linear(f"{block}.mlp.fc1", width, vit.mlp)
            linear(f"{block}.mlp.fc2", vit.mlp, width)
            if vit.dino:
                shapes[f"{block}.ls1.scale_factor"] = shapes[f"{block}.ls2.scale_factor"] = (width,)
        norm(f"{root}.norm", width)
        if not vit.dino:
            pool = f"{root}.attn_pool"
            shapes[f"{pool}.latent"] = (1, 1, width)
            linear(f"{pool}.q", width, width)
            linear(f"{pool}.kv", width, 2 * width)
            linear(f"{pool}.proj", width, width)
            norm(f"{pool}.norm", width)
            linear(f"{pool}.mlp.fc1", width, vit.mlp)
            linear(f"{pool}.mlp.fc2", vit.mlp, width)
    vision, hidden = sizes.dino.width + sizes.siglip.width, sizes.hidden
    linear("projector.fc1", vision, 4 * vision)
    linear("projector.fc2", 4 * vision, hidden)
    linear("projector.fc3", hidden, hidden)
    shapes["language_model.model.embed_tokens.weight"] = (32064, hidden)
    for index in range(sizes.layers):
        layer = f"language_model.model.layers.{index}"
        for name in "qkvo":
            linear(f"{layer}.self_attn.{name}_proj", hidden, hidden, bias=False)
        linear(f"{layer}.mlp.gate_proj", hidden, sizes.intermediate, bias=False)
        linear(f"{layer}.mlp.up_proj", hidden, sizes.intermediate, bias=False)
        linear(f"{layer}.mlp.down_proj", sizes.intermediate, hidden, bias=False)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["language_model.model.norm.weight"] = (hidden,)
    shapes["language_model.lm_head.weight"] = (32064, hidden)
    return shapes


def head_layout(hidden: int, action_dim: int = 7) -> dict[str, tuple[int, ...]]:
    """Of the ``action_head`` file."""
    blocks = {
        f"model.mlp_resnet_blocks.{index}.ffn.{place}.{kind}": (hidden, hidden)
        if (place, kind) == (1, "weight")
        else (hidden,)
        for index in range(2)
        for place in (0, 1)
        for kind in ("weight", "bias")
    }
    return {
        "model.layer_norm1.weight": (hidden * action_dim,),
        "model.layer_norm1.bias": (hidden * action_dim,),
        "model.fc1.weight": (hidden, hidden * action_dim),
        "model.fc1.bias": (hidden,),
        **blocks,
        "model.layer_norm2.weight": (hidden,),
        "model.layer_norm2.bias": (hidden,),
        "model.fc2.weight": (action_dim, hidden),
        "model.fc2.bias": (action_dim,),
    }


def proprio_layout(hidden: int, state_dim: int = 8) -> dict[str, tuple[int, ...]]:
    """Of the ``proprio_projector`` file."""
    return {
        "fc1.weight": (hidden, state_dim),
        "fc1.bias": (hidden,),
        "fc2.weight": (hidden, hidden),
        "fc2.bias": (hidden,),
    }


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Large enough that every one matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        scale = 0.3 / math.sqrt(shape[-1]) * 3 if len(shape) == 2 and "embed" not in name else 0.3
        weights[name] = x * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return weights


def config(sizes: Sizes) -> dict[str, Any]:
    """The keys of a published ``config.json`` that say what the weights are."""
    text: dict[str, Any] = {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    }
    if sizes is not FULL:  # the published one leaves what are Llama's defaults out
        text |= {
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
        }
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "image_sizes": [sizes.image, sizes.image],
        "n_action_bins": 256,
        "norm_stats": {"bridge_orig": {"action": ACTION}},
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": text,
        "timm_model_ids": list(sizes.names),
        "timm_override_act_layers": [None, None],
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
    }


def write_checkpoint(directory: Path, *, sizes: Sizes = SMALL, l1: bool = False, shards: int = 2) -> dict[str, Tensor]:
    """A folder of plain tensors; returns them."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(layout(sizes))
    names = sorted(weights)
    places = {
        name: f"model-{i * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == file}, directory / file)
    write = lambda name, content: (directory / name).write_text(json.dumps(content))  # noqa: E731
    write("model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    write("config.json", config(sizes))
    write("dataset_statistics.json", {"libero_10_no_noops": {"action": ACTION, "proprio": PROPRIO}})
    write(
        "preprocessor_config.json",
        {"means": [[0.5, 0.4, 0.3], [0.5, 0.5, 0.5]], "stds": [[0.2, 0.3, 0.4], [0.5, 0.5, 0.5]]},
    )
    (directory / "tokenizer.json").write_text(word_tokenizer().to_str())
    if l1:
        parts = {"action_head": head_layout(sizes.hidden), "proprio_projector": proprio_layout(sizes.hidden)}
        for name, shapes in parts.items():
            state = random_weights(shapes, seed=1)
            torch.save(
                {f"module.{key}": tensor for key, tensor in state.items()}, directory / f"{name}--150_checkpoint.pt"
            )
            weights |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return weights


def word_tokenizer() -> Tokenizer:
    """A token a word, with the special ids of Llama's."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 10 + index for index, word in enumerate(WORDS)}
    vocabulary |= {f"<{index}>": index for index in range(32001) if index not in set(vocabulary.values())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def spec(*, chunks: int = 3, values: int = 1, **fields: Any) -> PolicySpec:
    return PolicySpec(
        **{
            "action_dim": 7,
            "num_action_chunks": chunks,
            "state_dim": 8,
            "image_shapes": {"agentview": (40, 40), "wrist": (28, 28)},
            "values_per_chunk": values,
            **fields,
        }
    )


def observe(n: int = 4, seed: int = 0) -> EnvObs:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"agentview": (40, 40), "wrist": (28, 28)}
    texts = ("open the drawer", "Put the red bowl on the blue plate", "pick it up")
    return EnvObs(
        env_ids=torch.arange(n),
        images={
            name: torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in sizes.items()
        },
        state=torch.randn(n, 8, generator=generator),
        instructions=tuple(texts[i % 3] for i in range(n)),
    )


# --- The forward pass of one sample, in plain functions of the weights.


def hidden_states(weights: dict[str, Tensor], sizes: Sizes, embeddings: Tensor, *, causal: bool) -> Tensor:
    """[S,H] -> [S,H]: Llama 2, with the final norm."""
    x, count = embeddings, len(embeddings)
    head = sizes.hidden // sizes.heads
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, head, 2) / head)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    mask = torch.ones(count, count).tril().bool() if causal else torch.ones(count, count).bool()

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[name] * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotate(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., head // 2 :], x[..., : head // 2]], -1)
        return x * cos + turned * sin

    for index in range(sizes.layers):
        layer = f"language_model.model.layers.{index}"
        y = norm(x, f"{layer}.input_layernorm.weight")
        query, key, value = (
            (y @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).unflatten(-1, (sizes.heads, head)).transpose(0, 1)
            for name in "qkv"
        )
        scores = rotate(query) @ rotate(key).transpose(1, 2) / math.sqrt(head)
        attention = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = (attention @ value).transpose(0, 1).flatten(1)
        x = x + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        y = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = functional.silu(y @ weights[f"{layer}.mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ weights[f"{layer}.mlp.up_proj.weight"].T)) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "language_model.model.norm.weight")


def patch_tokens(weights: dict[str, Tensor], sizes: Sizes, pixels: Tensor) -> Tensor:
    """[6,H,W] -> [P,H]."""
    features = [
        _vit(weights, f"vision_backbone.{name}", vit, pixels[3 * i : 3 * i + 3])
        for i, (name, vit) in enumerate((("featurizer", sizes.dino), ("fused_featurizer", sizes.siglip)))
    ]
    x = _linear(weights, "projector.fc1", torch.cat(features, 1))
    x = _linear(weights, "projector.fc2", functional.gelu(x))
    return _linear(weights, "projector.fc3", functional.gelu(x))


def _vit(weights: dict[str, Tensor], root: str, vit: Vit, pixels: Tensor) -> Tensor:
    side = pixels.shape[1] // 14
    patches = pixels.reshape(3, side, 14, side, 14).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
    kernel = weights[f"{root}.patch_embed.proj.weight"].flatten(1)
    x = patches @ kernel.T + weights[f"{root}.patch_embed.proj.bias"] + weights[f"{root}.pos_embed"][0]
    if vit.dino:
        x = torch.cat([weights[f"{root}.cls_token"][0], weights[f"{root}.reg_token"][0], x])
    head = vit.width // vit.heads
    for index in range(vit.depth - 1):
        block = f"{root}.blocks.{index}"
        query, key, value = (
            part.unflatten(-1, (vit.heads, head)).transpose(0, 1)
            for part in _linear(weights, f"{block}.attn.qkv", _norm(weights, f"{block}.norm1", x)).chunk(3, -1)
        )
        mixed = ((query @ key.transpose(1, 2) / math.sqrt(head)).softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = x + weights.get(f"{block}.ls1.scale_factor", 1.0) * _linear(weights, f"{block}.attn.proj", mixed)
        y = functional.gelu(_linear(weights, f"{block}.mlp.fc1", _norm(weights, f"{block}.norm2", x)))
        x = x + weights.get(f"{block}.ls2.scale_factor", 1.0) * _linear(weights, f"{block}.mlp.fc2", y)
    return x[-side * side :]


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]
