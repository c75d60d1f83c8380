"""A small one of every model that is made fresh, with adapters and without."""

from __future__ import annotations

from typing import Any

import torch

from embodied_rl.models.base import Policy, PolicySpec
from embodied_rl.models.registry import build_policy, policy_of
from embodied_rl.schema import LoraSettings, ModelConfig

STATE = PolicySpec(action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={}, values_per_chunk=1)
IMAGES = PolicySpec(
    action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={"front": (32, 32)}, values_per_chunk=1
)
PIXELS = PolicySpec(
    action_dim=2, num_action_chunks=3, state_dim=4, image_shapes={"front": (36, 36)}, values_per_chunk=1
)
LANGUAGE = PolicySpec(action_dim=1, num_action_chunks=6, state_dim=0, image_shapes={}, values_per_chunk=1)
MODELS: dict[str, tuple[PolicySpec, dict[str, Any]]] = {
    "mlp": (STATE, {"hidden_size": 16}),
    "cnn": (PIXELS, {"hidden_size": 16, "image_features": 16}),
    "tiny_vla": (IMAGES, {"hidden_size": 32, "num_layers": 2}),
    "causal_lm": (
        LANGUAGE,
        {
            "architecture": {
                "type": "qwen2",
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "intermediate_size": 64,
            }
        },
    ),
}


def settings(**fields: Any) -> LoraSettings:
    return LoraSettings(
        **{
            "path": None,
            "rank": 4,
            "alpha": 8,
            "dropout": 0.0,
            "target_modules": "all-linear",
            "use_rslora": False,
            "init_lora_weights": "default",
            "modules_to_save": [],
            **fields,
        }
    )


def fresh(model: str) -> Policy:
    torch.manual_seed(0)
    spec, params = MODELS[model]
    return build_policy(model, spec, params)


def inputs(model: str) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    if model == "mlp":
        return {"state": torch.randn(5, 4, generator=rng), "samples": torch.randn(5, 3, 2, generator=rng)}
    if model == "cnn":
        return {
            "state": torch.randn(5, 4, generator=rng),
            "images/front": torch.randint(0, 256, (5, 36, 36, 3), generator=rng, dtype=torch.uint8),
            "samples": torch.randn(5, 3, 2, generator=rng),
        }
    if model == "tiny_vla":
        return {
            "words": torch.randint(1, 50, (5, 24), generator=rng),
            "proprio": torch.randn(5, 4, generator=rng),
            "images/front": torch.randint(0, 256, (5, 32, 32, 3), generator=rng, dtype=torch.uint8),
            "bins": torch.randint(0, 256, (5, 3, 2), generator=rng),
        }
    return {
        "prompt_ids": torch.randint(5, 20, (5, 4), generator=rng),
        "prompt_lengths": torch.full((5,), 4),
        "response_ids": torch.randint(5, 20, (5, 6), generator=rng),
        "response_lengths": torch.full((5,), 6),
    }


def logprobs(policy: Policy, model: str) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval()(inputs(model), temperature=1.0).logprobs


def model_config(
    model: str, *, path: str | None = None, path_of_adapters: str | None = None, rank: int = 0, **lora: Any
) -> ModelConfig:
    """Without adapters, unless they have a rank or a path."""
    _, params = MODELS[model]
    return ModelConfig(
        model_type=model, path=path, params=params, lora=settings(path=path_of_adapters, rank=rank, **lora)
    )


def shaken(config: ModelConfig, seed: int = 1) -> Policy:
    """The configuration's policy, every trainable weight of it moved."""
    torch.manual_seed(0)
    policy = policy_of(config, MODELS[config.model_type][0])
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return policy
