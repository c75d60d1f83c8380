"""Layers of transformers: the implementation of their attention (``model.attn_implementation``), and no dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodied_rl.errors import UserError
from embodied_rl.models.base import Policy


def check_attention(model: type[Policy], implementation: str | None) -> None:
    """Raise UserError unless the model's layers can have this implementation; None is what they have anyway."""
    if implementation is None or implementation in model.attentions:
        return
    can = f"use {' or '.join(model.attentions)}, or null" if model.attentions else "use null: it has no such layers"
    raise UserError(f"model.attn_implementation: got {implementation!r}, which {model.__name__} cannot have; {can}")


def set_attention(policy: Policy, implementation: str) -> None:
    """Give every layer of transformers this implementation. Layers of our own keep torch's scaled dot product.

    Raises:
        UserError: as :func:`check_attention`.
    """
    from transformers import PreTrainedModel  # takes a second, and most runs choose nothing

    check_attention(type(policy), implementation)
    for module in policy.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(implementation)


def disable_dropout(policy: Policy) -> None:
    """Take the dropout of a checkpoint's config out of transformers' layers, so that ratios start at 1.

    An actor's update puts its policy into training mode, for the dropout of adapters, which are added later.
    """
    for module in policy.modules():
        # transformers_modules: from a folder's own code
        if not type(module).__module__.startswith(("transformers.", "transformers_modules.")):
            continue
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        for part in module.children():
            if isinstance(part, nn.Dropout):
                part.p = 0.0


def attention_mask(layers: nn.Module, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask, true where a token may be looked at, as the attention of ``layers`` takes it.

    Eager attention adds it to the scores.
    """
    config: Any = layers.config
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
