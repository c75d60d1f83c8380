"""The learning rate over a run: a function of the training step, so that nothing has to be saved to resume."""

from __future__ import annotations

import math

from embodied_rl.schema import LRScheduleConfig


def learning_rate_factor(step: int, config: LRScheduleConfig, *, total_steps: int) -> float:
    """What the configured rates are multiplied by in a training step.

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
    warm_up = warm_up_steps(config, total_steps)
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


def warm_up_steps(config: LRScheduleConfig, total_steps: int) -> int:
    if config.lr_warmup_fraction is not None:
        return round(config.lr_warmup_fraction * total_steps)
    return config.lr_warmup_iters
