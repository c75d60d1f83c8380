"""Checkpoints in the published layout, small: upstream's names and shapes, weights from :mod:`golden_inputs`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_rl.contracts import EnvObs
from embodied_rl.models.base import PolicySpec
from tests.models.openvla import golden_inputs as given

PARTS = ("action_head", "proprio_projector")
ENCODERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
SMALL_ENCODERS = ("vit_tiny_test_dinov2", "vit_tiny_test_siglip")
HIDDEN = 32
"""Of the small network."""
_GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def facts(variant: str) -> dict[str, Any]:
    """What ``scripts/golden/openvla.py`` wrote of ``openvla`` or ``openvla_oft``: names, texts, whole numbers."""
    return json.loads((_GOLDEN / f"{variant}.json").read_text())


@functools.cache
def tensors(variant: str) -> dict[str, Tensor]:
    """The same script's arrays."""
    return load_file(_GOLDEN / f"{variant}.safetensors")


def layout() -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of upstream's small network."""
    return {name: tuple(shape) for name, shape in facts("openvla")["layout"]["small"].items()}


def part_layout(name: str) -> dict[str, tuple[int, ...]]:
    """Of one of :data:`PARTS` for the small network."""
    return {key: tuple(shape) for key, shape in facts("openvla_oft")["layout"]["small"][name].items()}


def weights_of(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> dict[str, Tensor]:
    return {name: torch.from_numpy(given.weight(prefix + name, shape)) for name, shape in shapes.items()}


def config(*, full: bool = False) -> dict[str, Any]:
    """The keys of a published ``config.json`` that say what the weights are."""
    text: dict[str, Any] = {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    }
    if not full:  # the published one leaves what are Llama's defaults out
        text |= {
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "image_sizes": [224 if full else given.IMAGE] * 2,
        "n_action_bins": 256,
        "norm_stats": {"bridge_orig": {"action": given.ACTION}},
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": text,
        "timm_model_ids": list(ENCODERS if full else SMALL_ENCODERS),
        "timm_override_act_layers": [None, None],
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
    }


def write_checkpoint(directory: Path, *, l1: bool = False, shards: int = 2) -> dict[str, Tensor]:
    """A folder of plain tensors; returns them."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = weights_of(layout())
    names = sorted(weights)
    places = {
        name: f"model-{i * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == file}, directory / file)
    write = lambda name, content: (directory / name).write_text(json.dumps(content))  # noqa: E731
    write("model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    write("config.json", config())
    write("dataset_statistics.json", given.STATISTICS)
    write("preprocessor_config.json", {"means": given.MEANS, "stds": given.STDS})
    (directory / "tokenizer.json").write_text(given.word_tokenizer().to_str())
    for name in PARTS if l1 else ():
        state = weights_of(part_layout(name), f"{name}.")
        torch.save({f"module.{key}": tensor for key, tensor in state.items()}, directory / f"{name}--150_checkpoint.pt")
        weights |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return weights


def spec(*, chunks: int = 3, values: int = 1, **fields: Any) -> PolicySpec:
    return PolicySpec(
        **{
            "action_dim": 7,
            "num_action_chunks": chunks,
            "state_dim": 8,
            "image_shapes": given.CAMERAS,
            "values_per_chunk": values,
            **fields,
        }
    )


def observe(n: int = 4, seed: int = 0) -> EnvObs:
    generator = torch.Generator().manual_seed(seed)
    texts = ("open the drawer", "Put the red bowl on the blue plate", "pick it up")
    return EnvObs(
        env_ids=torch.arange(n),
        images={
            name: torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in given.CAMERAS.items()
        },
        state=torch.randn(n, 8, generator=generator),
        instructions=tuple(texts[i % 3] for i in range(n)),
    )
