"""The optimiser, and its learning rates over a run: a function of the step, so there is nothing to save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.optim import Optimizer

from embodied_rl.schema import LRScheduleConfig, OptimConfig
from embodied_rl.training.compact_adam import CompactAdamW
from embodied_rl.training.uncompiled import UncompiledAdamW


class Grouped(Protocol):
    """A network that says which of its parameters are trained apart, such as a policy."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def value_parameters(self) -> list[torch.nn.Parameter]:
        """Those that train at ``value_lr``."""
        ...

    def undecayed_parameters(self) -> list[torch.nn.Parameter]: ...


def build_optimizer(policy: Grouped, config: OptimConfig) -> Optimizer:
    """AdamW, fused or with small moments; a learning rate of its own for the value head, and no weight decay on biases
    and norms."""
    of_value_head = {id(p) for p in policy.value_parameters()}
    undecayed = {id(p) for p in policy.undecayed_parameters()}
    value_lr = config.lr if config.value_lr is None else config.value_lr
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for parameter in policy.parameters():
        if parameter.requires_grad:
            rate = value_lr if id(parameter) in of_value_head else config.lr
            decay = 0.0 if id(parameter) in undecayed else config.weight_decay
            groups.setdefault((rate, decay), []).append(parameter)
    options = [
        {"params": parameters, "lr": rate, "initial_lr": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    if config.state_dtype != "float32":
        return CompactAdamW(options, lr=config.lr, betas=betas, eps=config.adam_eps, dtype=config.state_dtype)
    return UncompiledAdamW(options, betas=betas, eps=config.adam_eps, fused=True)


def set_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Make every rate the configured one times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter that has none yet, and leave that of the others as it is.

    A parameter that never had a gradient has none, and a checkpoint holds the state of all: saving depends neither on
    what was trained so far nor on whether a step was made. The optimiser makes it by a step with gradients and learning
    rates of zero for those parameters alone; its count is undone.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not missing:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad(set_to_none=True)
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter in missing:
        optimizer.state[parameter]["step"].zero_()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def learning_rate_factor(step: int, config: LRScheduleConfig, *, total_steps: int) -> float:
    """Return the factor on the configured rates in a training step.

    First a linear warm-up: ``(step + 1) / warm-up``. Then, over the steps up to the decay's end, with p running from 0
    to 1 and m being ``min_lr_ratio``:

    - constant: 1;
    - linear: ``m + (1 - m)(1 - p)``;
    - cosine: ``m + (1 - m)(1 + cos πp) / 2``;
    - wsd (warm-up, stable, decay; MiniCPM, arXiv:2404.06395, section 4): 1, and linear over the last
      ``wsd_decay_fraction`` of them.

    Args:
        step: from 0.
        total_steps: the run's; the decay ends there unless ``lr_decay_iters`` says otherwise.
    """
    end = config.lr_decay_iters or total_steps
    warm_up = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warm_up = round(config.lr_warmup_fraction * total_steps)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(max((step - warm_up) / max(end - warm_up, 1), 0.0), 1.0)
    lowest = config.min_lr_ratio
    match config.lr_decay_style:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1.0 - progress
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            remaining = min((1.0 - progress) / config.wsd_decay_fraction, 1.0)
    return lowest + (1.0 - lowest) * remaining
