"""The optimiser."""

from __future__ import annotations

import torch
from torch.optim import AdamW, Optimizer

from embodied_rl.models.base import Policy
from embodied_rl.schema import OptimConfig


def build_optimizer(policy: Policy, config: OptimConfig) -> Optimizer:
    """AdamW, fused, with a learning rate of its own for the value head, and no weight decay on biases and norms."""
    of_value_head = {id(p) for p in policy.value_parameters()}
    undecayed = {id(p) for p in policy.undecayed_parameters()}
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for parameter in policy.parameters():
        if parameter.requires_grad:
            groups.setdefault((id(parameter) in of_value_head, id(parameter) not in undecayed), []).append(parameter)
    value_lr = config.lr if config.value_lr is None else config.value_lr
    return AdamW(
        [
            {
                "params": parameters,
                "lr": value_lr if is_value else config.lr,
                "initial_lr": value_lr if is_value else config.lr,
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for (is_value, decays), parameters in groups.items()
        ],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def set_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Make every rate the configured one times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
