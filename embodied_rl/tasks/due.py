"""When a run evaluates."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.evaluation.eval_file import evaluations_of
from embodied_rl.schema import RunnerConfig


def evaluates_after(config: RunnerConfig, step: int) -> bool:
    """Whether an evaluation is due after so many training steps."""
    at_end = config.eval_at_end and step == config.max_steps
    return at_end or (config.val_check_interval > 0 and step % config.val_check_interval == 0)


def misses_evaluation(config: RunnerConfig, checkpoint: Path, step: int) -> bool:
    """Whether an evaluation is due after this step, and the run that its checkpoint is in has none: it failed, or was
    ended, before."""
    if checkpoint.parent.name != "checkpoints" or step > config.max_steps:  # its run is elsewhere, or over
        return False
    return evaluates_after(config, step) and step not in evaluations_of(checkpoint.parent.parent)
