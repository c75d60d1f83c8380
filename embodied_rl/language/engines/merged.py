"""A policy's weights for engines that know no adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from embodied_rl.models.causal_lm.policy import CausalLMPolicy
from embodied_rl.models.weights.lora import ADAPTER

_BASE = ".base_layer."


@torch.no_grad()
def merged_weights(policy: CausalLMPolicy) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights with Hugging Face's names, adapters added to those under them, the value head left
    out. Tied weights come once. What has no adapter is the policy's own tensor, so copy it."""
    adapters = {name: layer for name, layer in policy.model.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            continue
        module, base, kind = name.partition(_BASE)
        if not base:
            yield name, parameter.detach()
            continue
        delta = adapters[module].get_delta_weight(ADAPTER) if kind == "weight" else None  # type: ignore[operator]
        yield f"{module}.{kind}", parameter if delta is None else parameter + delta
