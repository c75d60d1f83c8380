"""Partial credit for completions that look like the answer. Run: python examples/own_reward.py"""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import Field

import embodied_rl as er


def likeness(*, prompt: str, completion: str, answer: str, power: Annotated[float, Field(ge=0)] = 1.0) -> float:
    """The share of characters that completion and answer have in common, raised to ``power``."""
    return difflib.SequenceMatcher(None, completion.strip(), answer.strip()).ratio() ** power


if __name__ == "__main__":  # the run loads this file for likeness
    run = er.train(
        "task=math",
        f"reward.function={__file__}:likeness",
        "reward.params.power=2.0",
        "data.rollout_batch_size=8",
        "data.eval_size=16",
        "runner.max_steps=3",
        "runner.report=false",
        "cluster=serial",
    )
    rewards = [f"{row['rollout/score']:.3f}" for row in run.metrics if "rollout/score" in row]
    print(f"mean reward of each step: {', '.join(rewards)}; answers that are right in the end: {run.success:.0%}")
