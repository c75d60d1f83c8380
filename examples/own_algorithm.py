"""Advantages over a quantile of the group's returns. Run: python examples/own_algorithm.py"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

import embodied_rl as er
from embodied_rl.algorithms.advantages import AdvantageEstimate, AdvantageInputs, penalized_scores, same_everywhere
from embodied_rl.algorithms.catalog import advantage_estimator


@advantage_estimator(needs_groups=True, scores_episodes=True)
def quantile_baseline(
    inputs: AdvantageInputs, *, quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
) -> AdvantageEstimate:
    """``R - Q`` where Q is the quantile of the returns R of the group: 0.5 compares with the median."""
    scores = penalized_scores(inputs)
    advantages = torch.empty_like(scores)
    for group in inputs.group_ids.unique():
        members = inputs.group_ids == group
        advantages[members] = scores[members] - scores[members].quantile(quantile)
    return same_everywhere(inputs, advantages)


if __name__ == "__main__":  # the run loads this file for quantile_baseline
    run = er.train(
        "experiment=dummy_grpo",
        f"algorithm.adv_type={__file__}:quantile_baseline",
        "algorithm.params.quantile=0.7",
        "runner.max_steps=20",
        "runner.val_before_train=true",
        "env.eval.video_cfg.save_video=false",
        "runner.report=false",
        "cluster=serial",
    )
    print(f"success: {run.evaluations[0].rate:.0%} before training, {run.success:.0%} after")
